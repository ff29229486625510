"""Lines about requests in the log (--log-requests): how each ended, its tokens and times. Never its text."""

from __future__ import annotations

import logging
import time

from radixserve.engine.messages import Submit, TokenEvent

log = logging.getLogger("radixserve.requests")

# By the counter that a request ended in.
_ENDS = {
    "request_success": "finished",
    "num_aborted_requests": "aborted",
    "num_failed_requests": "failed",
    "admission_rejections": "refused",
}


class RequestLine:
    """One engine request; a choice of ``n`` is one, with the id of the whole request."""

    def __init__(self, request: Submit) -> None:
        self._facts: dict[str, str | float] = {"request_id": request.request_id, "tenant": request.tenant}
        self._started_at = time.monotonic()

    def first_token(self, event: TokenEvent, ttft_s: float) -> None:
        self._facts |= {"cached_tokens": event.cached_tokens, "ttft_s": round(ttft_s, 4)}

    def end(self, outcome: str, reason: str, *, prompt_tokens: int, generated_tokens: int) -> None:
        facts = self._facts
        facts |= {"outcome": _ENDS[outcome], "prompt_tokens": prompt_tokens, "generated_tokens": generated_tokens}
        facts["total_s"] = round(time.monotonic() - self._started_at, 4)
        if reason:
            facts["reason"] = reason
        first = f" ({facts['cached_tokens']} cached), TTFT {facts['ttft_s']:.3f} s" if "ttft_s" in facts else ""
        log.info(
            "request %s %s%s: %d prompt tokens%s, %d generated in %.2f s",
            *(facts["request_id"], facts["outcome"], f" ({reason})" if reason else "", prompt_tokens, first),
            *(generated_tokens, facts["total_s"]),
            extra={"facts": facts},
        )


def log_refusal(request_id: str, method: str, path: str, status: int) -> None:
    """An HTTP request was answered with an error: it did not reach the engine, or was turned away or lost there."""
    facts = {"request_id": request_id, "method": method, "path": path, "status": status}
    log.info("request %s answered %d: %s %s", request_id, status, method, path, extra={"facts": facts})
