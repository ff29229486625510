// The chat: one conversation, streamed, with what each answer cost.

import { call, errorOf, eventsOf } from "./api.js";
import { byId, count, duration, element } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Chat {
  /** ownRequests: ids of the requests sent from here, for others to mark. */
  constructor(ownRequests) {
    this.ownRequests = ownRequests;
    this.history = [];
    this.running = null;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running?.abort();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("reset").addEventListener("click", () => this.reset());
  }

  reset() {
    this.running?.abort();
    this.history = [];
    byId("messages").replaceChildren();
    byId("prompt").focus();
  }

  async send() {
    const text = byId("prompt").value;
    if (this.running || !text.trim()) return;
    byId("prompt").value = "";
    const history = this.history;
    history.push({ role: "user", content: text });
    this.show("user", text);
    const answer = this.show("assistant", "");
    this.running = new AbortController();
    this.setRunning(true);
    try {
      const content = await this.stream(answer, this.running.signal);
      history.push({ role: "assistant", content });
    } catch (error) {
      history.pop();
      byId("prompt").value ||= text; // for another try
      answer.facts.textContent = error.message;
      answer.facts.classList.add("error");
    }
    this.running = null;
    this.setRunning(false);
  }

  body() {
    const system = byId("system").value;
    const body = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.history],
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    for (const name of NUMBERS) {
      const value = byId(name).value;
      if (value !== "") body[name] = Number(value);
    }
    return body;
  }

  /** Returns the text, which ends early when it is stopped. Throws an Error that says what is wrong. */
  async stream(answer, signal) {
    const id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
    this.ownRequests.add(id);
    const begin = performance.now();
    let first = null, text = "", usage = null, end = "";
    try {
      const response = await call("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json", "x-request-id": id },
        body: JSON.stringify(this.body()),
        signal,
      });
      if (!response.ok) throw new Error(await errorOf(response));
      for await (const { data } of eventsOf(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        const choice = chunk.choices[0];
        const delta = choice?.delta.content ?? choice?.delta.reasoning_content ?? choice?.delta.reasoning;
        if (delta) {
          first ??= performance.now();
          text += delta;
          this.append(answer, delta);
        }
        if (choice?.finish_reason === "length") end = "cut at the token limit";
        this.tell(answer, begin, first, usage, end);
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      this.tell(answer, begin, first, usage, "stopped");
    }
    return text;
  }

  append(answer, text) {
    const list = byId("messages");
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    answer.text.append(text);
    if (atEnd) list.scrollTop = list.scrollHeight;
  }

  tell(answer, begin, first, usage, end) {
    const facts = [];
    if (first !== null) facts.push(`TTFT ${duration((first - begin) / 1000)}`);
    if (usage) {
      const seconds = (performance.now() - first) / 1000;
      if (first !== null && usage.completion_tokens > 1 && seconds > 0) {
        facts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
      }
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(`${count(usage.prompt_tokens, "prompt token")} (${cached} cached)`);
      facts.push(`${usage.completion_tokens} generated`);
    }
    if (end) facts.push(end);
    answer.facts.textContent = facts.join(" · ");
  }

  show(role, content) {
    const message = element("article", `message ${role}`);
    message.setAttribute("aria-label", role === "user" ? "You" : "Model");
    const text = element("p", "", content);
    const facts = element("span", "hint");
    message.append(text, facts);
    byId("messages").append(message);
    byId("messages").scrollTop = byId("messages").scrollHeight;
    return { text, facts };
  }

  setRunning(running) {
    byId("messages").setAttribute("aria-busy", running); // a screen reader hears the whole answer, not each token
    byId("send").disabled = running;
    byId("stop").disabled = !running;
    byId("prompt").focus();
  }
}
