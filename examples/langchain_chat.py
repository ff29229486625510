"""As a LangChain chat model: in a chain, streamed, in batches, and with structured output."""

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Translation(BaseModel):
    french: str


model = ChatOpenAI(base_url="http://localhost:8000/v1", api_key="none", model="smollm2-135m-instruct", max_tokens=24)
prompt = ChatPromptTemplate.from_messages([("system", "You are terse."), ("user", "Translate to French: {text}")])
chain = prompt | model

for chunk in chain.stream({"text": "good morning"}):
    print(chunk.content, end="", flush=True)
print()
for message in chain.batch([{"text": "bread"}, {"text": "water"}]):
    print(message.content, message.usage_metadata["total_tokens"])
print((prompt | model.with_structured_output(Translation, method="json_schema")).invoke({"text": "cheese"}))
