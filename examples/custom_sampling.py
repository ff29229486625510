"""How tokens are chosen: seeds, several choices, stop strings, biased tokens, log-probabilities."""

import math

import httpx
from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
prompt = "My favourite colour is"

# With a seed the answer is the same every time, whatever else the server does; choice i has seed + i.
rules = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 8, "n": 2}
first = client.completions.create(model=model, prompt=prompt, **rules)
again = client.completions.create(model=model, prompt=prompt, **rules)
print([choice.text for choice in first.choices])
assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]

# What OpenAI has no name for goes into extra_body.
extra = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
done = client.completions.create(model=model, prompt=prompt, stop=[".", "\n"], max_tokens=16, extra_body=extra)
print(done.choices[0].text, "|", done.choices[0].finish_reason)

# A bias of -100 forbids a token; token ids come from /tokenize.
tokens = httpx.post("http://localhost:8000/tokenize", json={"prompt": " blue"}).json()["tokens"]
other = client.completions.create(model=model, prompt=prompt, logit_bias={str(tokens[0]): -100}, max_tokens=4)
print(other.choices[0].text)

scored = client.completions.create(model=model, prompt=prompt, max_tokens=1, logprobs=5)
for token, logprob in scored.choices[0].logprobs.top_logprobs[0].items():
    print(f"{token!r}: {math.exp(logprob):.1%}")
