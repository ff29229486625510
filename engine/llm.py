"""Offline use: the engine in the caller's process, without a server."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from radixserve.configs.schema import DEFAULT_MODEL, ServeConfig
from radixserve.configs.sources import Layer, merge
from radixserve.engine.build import build_engine, ignore_progress
from radixserve.engine.built import new_scheduler
from radixserve.engine.errors import InvalidRequest, ModelError, RadixServeError
from radixserve.engine.interrupts import Interrupts
from radixserve.engine.loading import explained_lack_of_memory, shown_progress
from radixserve.engine.messages import FinishReason, Outputs, Rejected, Submit, TokenEvent, TokenLogprobs
from radixserve.engine.model_files import resolve_model
from radixserve.engine.pipeline import StepPipeline
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.text.detokenizer import StopStringMatcher
from radixserve.engine.text.text_model import TextModel, load_text_model

Prompt = str | Sequence[int]

_FRONTEND = b"offline"
_UNBOUNDED_QUEUE = 1 << 31


@dataclass(slots=True)
class Completion:
    """What came of one prompt. ``finish_reason``: stop, length, abort or error. ``token_ids`` include the stop token;
    ``text`` has neither it nor a stop string. ``logprobs``: one entry for each token, if asked for. ``ttft_s``: seconds
    from its submission to its first token."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    cached_tokens: int = 0
    ttft_s: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: str | None = None


class LLM:
    """A model to call from Python. Owns an engine; ``close`` or a ``with`` block gives its memory back.

    ``options`` are those of ``radixserve serve`` with underscores: ``LLM("owner/model", max_model_len=4096)``. Raises
    ``OptionError`` for an unknown or wrong one, ``ModelError`` and ``ConfigError`` when the model cannot be run.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, show_progress: bool = False, **options: Any):
        layer = Layer({"model": model, **options}, lambda name: name)
        config = merge([layer]).model_copy(
            update={"max_num_queued_reqs": _UNBOUNDED_QUEUE, "max_num_queued_tokens": _UNBOUNDED_QUEUE}
        )
        shown = shown_progress(partial(print, file=sys.stderr)) if show_progress else nullcontext(ignore_progress)
        with explained_lack_of_memory(model), shown as show:
            built = build_engine(config, show)
        self._text = _load_text(config)
        # Nobody watches the tokens come, so how a prompt is cut need not depend on the time that steps take.
        limits = replace(built.limits, target_itl_s=None)
        self._scheduler = new_scheduler(replace(built, limits=limits), config)
        self._grammars = built.grammars
        self._pipeline: StepPipeline | None = StepPipeline(self._scheduler, built.runner, overlap=built.overlap)
        self._close = built.close
        self._num_requests = 0
        self._open: dict[int, _Running] = {}
        self.max_model_len = limits.max_model_len
        self.description = built.description

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[Completion]:
        """Complete each prompt (text or token ids, one or several), in their order. All run together.

        ``sampling_params``: the same for all, or one for each. Raises ``InvalidRequest`` if one cannot be served; none
        is computed then. Ctrl-C takes effect between two steps, after which this can be called again.
        """
        listed = _as_list(prompts)
        rules = _rules_for(len(listed), sampling_params)
        with Interrupts() as interrupts, self._submitted(listed, rules, interrupts.check) as running:
            self._run(running, interrupts, show_progress)
            return [request.completion for request in running]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt and give its text in pieces, as they come. Leaving the iteration ends the request.

        Other calls may be made meanwhile; they move it on, too. Raises ``InvalidRequest`` if it cannot be served.
        """
        with self._submitted([prompt], _rules_for(1, sampling_params)) as (request,):
            completion, num_given = request.completion, 0
            while num_given < len(completion.text) or not completion.finish_reason:
                if piece := completion.text[num_given:]:
                    num_given += len(piece)
                    yield piece
                    continue
                with Interrupts():
                    self._step()
        if completion.error is not None:
            raise RadixServeError(completion.error)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Answer a conversation of OpenAI messages. Raises ``InvalidRequest`` if the model has no chat template."""
        ids = self._require_text().encode_chat(messages, chat_template_kwargs=chat_template_kwargs)
        return self.generate(ids, sampling_params)[0]

    def close(self) -> None:
        """Drop the weights and the KV cache. The object cannot generate any more."""
        self._pipeline = None
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, running: list[_Running], interrupts: Interrupts, show_progress: bool) -> None:
        """Step until all of ``running`` have ended, and nothing else is left to do. The bar ends here, too: Ctrl-C
        while an object is destroyed would be lost."""
        with tqdm(total=len(running), unit="prompt", disable=not show_progress) as bar:
            while self._step():
                interrupts.check()
                if show_progress:
                    bar.update(sum(bool(request.completion.finish_reason) for request in running) - bar.n)

    @contextmanager
    def _submitted(
        self, prompts: list[Prompt], rules: list[SamplingParams], check: Callable[[], None] = lambda: None
    ) -> Iterator[list[_Running]]:
        """Scope of requests, after which none of them goes on. ``check`` is called after each submission."""
        running: dict[int, _Running] = {}
        try:
            for prompt, rule in zip(prompts, rules, strict=True):
                self._submit(self._ids(prompt), rule, running)
                check()
            yield list(running.values())
        finally:
            for uid in running:
                if self._open.pop(uid, None) is not None:
                    self._scheduler.abort(_FRONTEND, uid)

    def _submit(self, ids: list[int], sampling: SamplingParams, running: dict[int, _Running]) -> None:
        self._num_requests += 1
        uid = self._num_requests
        packed = _pack(ids)
        constraint = None if sampling.grammar is None else self._grammars.compile(sampling.grammar)
        match self._scheduler.submit(_FRONTEND, Submit(uid, str(uid), packed, sampling), constraint):
            case Rejected(message=message, code=code, param=param, status=status):
                raise InvalidRequest(message, code=code, param=param, status=status)
        running[uid] = self._open[uid] = _Running(Completion(ids), sampling, self._text)

    def _step(self) -> bool:
        """Advance all open requests. False: there is nothing to do."""
        if self._pipeline is None:
            raise RuntimeError("this LLM is closed")
        has_work = self._pipeline.advance()
        for event in self._scheduler.take_outputs().get(_FRONTEND, Outputs()).each():
            request = self._open.get(event.uid)  # None: left by its caller, or ended at a stop string
            if request is not None and request.take(event):
                del self._open[event.uid]
                self._scheduler.abort(_FRONTEND, event.uid)
        return has_work

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._require_text().encode_prompt(prompt)
        if not isinstance(prompt, Iterable):
            raise InvalidRequest(f"a prompt is a text or a list of token ids, not {prompt!r}", param="prompts")
        return list(prompt)

    def _require_text(self) -> TextModel:
        if self._text is None:
            raise ModelError("the model has no tokenizer: give prompts as token ids, or a tokenizer")
        return self._text


class _Running:
    """A request on its way: turns its events into a ``Completion``."""

    def __init__(self, completion: Completion, sampling: SamplingParams, text: TextModel | None):
        self.completion = completion
        self._min_tokens = sampling.min_tokens
        self._detokenizer = text.tokenizer.detokenizer(skip_special_tokens=True) if text else None
        self._stops = StopStringMatcher(sampling.stop) if sampling.stop else None

    def take(self, event: TokenEvent) -> bool:
        """Add an event's tokens; true once the completion is whole."""
        completion = self.completion
        completion.cached_tokens = max(completion.cached_tokens, event.cached_tokens)
        completion.ttft_s += (event.queue_s or 0.0) + (event.prefill_s or 0.0)  # with the first token only
        completion.prompt_logprobs += event.prompt_logprobs or []
        completion.logprobs += event.logprobs or []
        completion.error = event.error
        stopped = event.finish is FinishReason.STOP
        for place, token in enumerate(event.token_ids, start=1):
            completion.token_ids.append(token)
            if self._detokenizer is not None and not (stopped and place == len(event.token_ids)):
                self._append(self._detokenizer.feed(token))
            if self._matched:
                break
        if self._detokenizer is not None and event.finish is not None and not self._matched:
            self._append(self._detokenizer.finish())
        if self._matched:
            completion.finish_reason = FinishReason.STOP.value
        elif event.finish is not None:
            completion.text += self._stops.finish() if self._stops else ""
            completion.finish_reason = event.finish.value
        return bool(completion.finish_reason)

    @property
    def _matched(self) -> bool:
        """Whether a stop string was found."""
        return self._stops is not None and self._stops.matched is not None

    def _append(self, text: str) -> None:
        watches = self._stops is not None and len(self.completion.token_ids) > self._min_tokens
        self.completion.text += self._stops.feed(text) if self._stops and watches else text


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt is a text or a list of ints, several are a list or whatever else yields those."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise InvalidRequest(f"prompts: a text, a list of token ids, or several, not {prompts!r}", param="prompts")
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int | np.integer) else listed


def _pack(ids: list[int]) -> bytes:
    """As little-endian int32s. In one pass, since prompts can hold millions of tokens."""
    try:
        packed = array("i", ids)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"a prompt is a text or a list of token ids: {error}", param="prompts") from error
    if ids and np.frombuffer(packed, np.int32).min() < 0:
        raise InvalidRequest("prompt token ids must be 0 or more", param="prompts")
    return np.frombuffer(packed, np.int32).astype("<i4", copy=False).tobytes()


def _rules_for(count: int, given: SamplingParams | Iterable[SamplingParams] | None) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    listed = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(rules, SamplingParams) for rules in listed):
        raise InvalidRequest(
            f"sampling_params: a SamplingParams, or a list of them, not {given!r}", param="sampling_params"
        )
    if len(listed) != count:
        raise InvalidRequest(f"{len(listed)} sampling_params for {count} prompts", param="sampling_params")
    return listed


def _load_text(config: ServeConfig) -> TextModel | None:
    """None for a model without a tokenizer, which only token ids can be sent to."""
    files = resolve_model(config.model, config.load_format)
    if files.gguf is None and files.tokenizer is None and config.tokenizer is None:
        return None
    return load_text_model(files, config)
