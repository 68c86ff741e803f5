"""From text to micro-batches: corpus, tokenizer, token files, sequences, the order of the data.

`sequences`, `batch_order`, `token_files` and `special_tokens` need only torch and numpy, so that
training runs where `tokenizers`, `datasets` and pyarrow are not installed.
"""
