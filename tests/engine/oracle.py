"""transformers as the oracle, and the script that records its answers: ``python -m radixserve.tests.engine.oracle``.

The record keeps the suite fast; a few of its answers are computed anew by the tests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixserve.configs.schema import DEFAULT_MODEL, ModelOptions
from radixserve.engine.model_files import resolve_model
from radixserve.engine.text.text_model import load_text_model

RECORD = Path(__file__).parent / "data" / "smollm2_greedy.json"
NUM_TOKENS = 16
# Where the best two logits are nearer than this, another order of summation may choose the other one.
NEAR_TIE = 1e-3

_SHORT = """The capital of France is|Water boils at|def fibonacci(n):|1, 2, 3, 5, 8, 13,|Once upon a time
Dear Sir or Madam,|SELECT name FROM users WHERE|The quick brown fox
In 1969, humans|La capitale de l'Espagne est|Der schnelle braune Fuchs
import numpy as np|E = mc^2 means that|Q: What is 7 times 8? A:|She opened the door and|{"name": "Ada", "age":
The three primary colors are|<html><head><title>|To be, or not to be,|My favourite recipe needs|A haiku about rain:
Photosynthesis is the process by which|The stock market fell because|for i in range(10):|Hello|a|日本の首都は
Roses are red, violets are""".replace("\n", "|").split("|")
_QUESTIONS = """What is gravity?|Write a poem about the sea.|Name three planets.|How do I cook rice?|Who wrote Hamlet?
Explain recursion briefly.|Translate 'good morning' to French.|What is 12 + 30?""".replace("\n", "|").split("|")
_TOPICS = ("rivers", "engines", "bread", "violins", "glaciers", "bridges", "clocks")


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what transformers generates for it greedily in fp32, up to the first near tie."""

    prompt: list[int]
    tokens: list[int]


def recorded_answers() -> list[Answer]:
    return [Answer(**entry) for entry in json.loads(RECORD.read_text())]


def load_default_model() -> Any:
    """The default model in transformers, fp32. (Its ``from_pretrained`` wants one more package for GGUF files.)"""
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = resolve_model(DEFAULT_MODEL).gguf
    assert path is not None
    with no_init_weights():
        model = LlamaForCausalLM(AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)).float()
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def generate(model: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """Greedy tokens up to the first near tie."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    near_ties = (best[:, 0] - best[:, 1] < NEAR_TIE).nonzero()
    length = int(near_ties[0]) if len(near_ties) else num_tokens
    tokens: list[int] = out.sequences[0, len(prompt) :][:length].tolist()
    return tokens


def _prompts() -> list[list[int]]:
    text = load_text_model(resolve_model(DEFAULT_MODEL), ModelOptions())
    raw = [text.encode_prompt(prompt) for prompt in _SHORT + [_essay(i, topic) for i, topic in enumerate(_TOPICS)]]
    chats = [text.encode_chat([{"role": "user", "content": question}]) for question in _QUESTIONS]
    # The conversations go on, so that prompts share prefixes of several lengths.
    again = [
        text.encode_chat(
            [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "Let me think about it."},
                {"role": "user", "content": "Please go on, and be brief."},
            ]
        )
        for question in _QUESTIONS
    ]
    return (raw + chats + again)[:50]


def _essay(index: int, topic: str) -> str:
    """About 30 to 600 tokens."""
    sentences = [f"Note {n} on {topic}: item {n * 37 % 101} was seen {n * 13 % 29} times." for n in range(index**2 + 2)]
    return " ".join(sentences)


def main() -> None:
    model = load_default_model()
    answers = [{"prompt": prompt, "tokens": generate(model, prompt)} for prompt in _prompts()]
    RECORD.write_text("[\n" + ",\n".join(json.dumps(answer) for answer in answers) + "\n]\n")
    lengths = [len(answer["prompt"]) for answer in answers]
    print(f"{len(answers)} prompts of {min(lengths)} to {max(lengths)} tokens")
    print("kept tokens:", sorted(len(answer["tokens"]) for answer in answers))


if __name__ == "__main__":
    main()
