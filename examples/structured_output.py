"""Answers that fit a form, with any model: a pydantic model, a regular expression, one of some texts."""

from openai import OpenAI
from pydantic import BaseModel, Field


class Animal(BaseModel):
    name: str = Field(max_length=20)
    legs: int = Field(ge=0, le=100)
    can_fly: bool


client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id

parsed = client.chat.completions.parse(
    model=model, messages=[{"role": "user", "content": "Describe a sparrow as JSON."}], response_format=Animal
)
print(parsed.choices[0].message.parsed)

for question, form in (
    ("When did the Second World War end? Answer with a date.", {"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}),
    ("Is the sentence 'I love this' friendly?", {"choice": ["friendly", "unfriendly", "neither"]}),
):
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], extra_body={"structured_outputs": form}
    )
    print(answer.choices[0].message.content)
