"""The Llama model, its attention, its loss and its Hugging Face form."""
