"""The model calls a function of yours, and answers with its result."""

import json

from openai import OpenAI


def temperature(city: str) -> int:
    return {"Oslo": 7, "Rome": 24}.get(city, 15)


client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id
tool = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "Degrees Celsius in a city, now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}
messages = [{"role": "user", "content": "How warm is it in Oslo?"}]
# "auto" lets the model decide; a small one decides badly.
first = client.chat.completions.create(
    model=model, messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=32
)
message = first.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    result = temperature(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) = {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
last = client.chat.completions.create(model=model, messages=messages, tools=[tool], tool_choice="none", max_tokens=32)
print(last.choices[0].message.content)
