"""Text in and out: tokenizers, chat templates, incremental detokenization. Loads no torch and no transformers."""
