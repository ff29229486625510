"""A file of requests to a file of answers: ``python batch_file.py requests.jsonl answers.jsonl``.

Each line is a JSON object as in OpenAI's batch files: ``{"custom_id": "a", "body": {"messages": [...]}}``. Answers come
in the order of the requests; one that fails has an ``error`` and hurts no other.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from openai import APIError, AsyncOpenAI

AT_ONCE = 64  # the server batches what runs at the same time


async def answer(client: AsyncOpenAI, model: str, line: str, seats: asyncio.Semaphore) -> dict[str, Any]:
    request = json.loads(line)
    async with seats:
        try:
            done = await client.chat.completions.create(**{"model": model, **request["body"]})
        except APIError as error:
            return {"custom_id": request["custom_id"], "error": str(error)}
    return {"custom_id": request["custom_id"], "body": done.model_dump(exclude_none=True)}


async def main(requests: Path, answers: Path) -> None:
    seats = asyncio.Semaphore(AT_ONCE)
    async with AsyncOpenAI(base_url="http://localhost:8000/v1", api_key="none", timeout=3600) as client:
        model = (await client.models.list()).data[0].id
        lines = requests.read_text().splitlines()
        done = await asyncio.gather(*(answer(client, model, line, seats) for line in lines))
    answers.write_text("".join(json.dumps(item) + "\n" for item in done))
    print(f"{len(done)} answers, {sum('error' in item for item in done)} of them errors, in {answers}")


if len(sys.argv) != 3:
    sys.exit(__doc__)
asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
