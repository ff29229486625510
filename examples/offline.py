"""The engine in this process, without a server: batches, chats, streams, token ids, log-probabilities."""

from radixserve import LLM, SamplingParams

with LLM() as llm:  # or LLM("owner/model", max_model_len=4096): options as those of `radixserve serve`
    story = "Once upon a time there was a lighthouse keeper who collected stones. " * 4
    prompts = [story + "His name was", story + "One morning he"]
    for done in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)):
        print(f"{done.text!r} ({done.cached_tokens} of {len(done.prompt_token_ids)} prompt tokens cached)")

    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
    print(answer.text)

    for piece in llm.stream("The capital of France is", SamplingParams(temperature=0, max_tokens=16)):
        print(piece, end="", flush=True)
    print()

    (scored,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    print(scored.token_ids, [(token, round(logprob, 2)) for token, logprob in scored.logprobs[0].top])
