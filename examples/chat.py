"""A conversation: each turn sends all that was said, of which the server computes only what is new."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "system", "content": "You answer in one short sentence."}]
for question in ("What is the capital of France?", "And of Italy?", "Which of them is larger?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
    text = answer.choices[0].message.content
    messages.append({"role": "assistant", "content": text})
    usage = answer.usage
    print(f"> {question}\n{text}")
    print(f"  ({usage.prompt_tokens} prompt tokens, {usage.prompt_tokens_details.cached_tokens} of them cached)")
