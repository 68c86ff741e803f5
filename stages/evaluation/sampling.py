"""Continuations of a prompt, one token at a time."""

import torch

from stages.data.special_tokens import EOT_ID
from stages.model.llama import Llama


@torch.no_grad()
def continue_tokens(
    model: Llama,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    window_tokens: int,
    seed: int,
) -> list[int]:
    """The new token ids after `prompt`, up to [EOT] (not included) or `max_new_tokens`.

    Args:
        prompt: ids, at least one, [BOT] first.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_k: tokens that are drawn from.
        window_tokens: at most this many tokens of context, as in training.
        seed: of a generator of its own, on the CPU: the same text on every device whose logits agree.
    """
    device = model.embed_tokens.weight.device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        context = torch.tensor([ids[-window_tokens:]], device=device)
        logits_V = model.lm_head(model(context)[0, -1]).float().cpu()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            values, candidates = logits_V.topk(min(top_k, logits_V.numel()))
            chosen = torch.multinomial((values / temperature).softmax(0), 1, generator=generator)
            token = int(candidates[chosen])
        if token == EOT_ID:
            break
        ids.append(token)
    return ids[len(prompt) :]
