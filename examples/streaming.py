"""An answer as it grows. Closing the stream ends the request in the server too."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Count from one to five in words."}]

stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=32, stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:  # in the last chunk
        print(f"\n{chunk.usage.completion_tokens} tokens")

with client.chat.completions.create(model=model, messages=messages, max_tokens=32, stream=True) as stream:
    for chunk in stream:
        text = chunk.choices[0].delta.content or ""
        print(text, end="", flush=True)
        if "three" in text.lower():
            break  # leaving the block closes the connection: enough
print()
