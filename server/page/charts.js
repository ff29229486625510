// Charts and tables of the engine's numbers.

import { byId, count, duration, element, shape } from "./dom.js";

const HISTORY = 240; // observations, four a second
const MAX_BARS = 64;
const LATENCIES = [
  ["First token", "time_to_first_token_seconds"],
  ["Between tokens", "inter_token_latency_seconds"],
  ["Whole answer", "e2e_request_latency_seconds"],
];

export class Occupancy {
  constructor() {
    this.history = [];
    this.areas = ["cached", "used"].map((name) => byId("kv").appendChild(shape("path", { class: name })));
  }

  show(stats) {
    const kept = stats.kv_evictable_tokens, total = stats.kv_total_tokens;
    const used = total - stats.kv_free_tokens - kept;
    this.history.push([used + kept, used]);
    this.history = this.history.slice(-HISTORY);
    const left = HISTORY - this.history.length;
    // A small share of a large cache would not be seen on a scale of all of it.
    const top = Math.min(total, 1.25 * Math.max(64, ...this.history.map(([filled]) => filled)));
    const y = (tokens) => (60 - (60 * tokens) / Math.max(1, top)).toFixed(1);
    this.areas.forEach((area, kind) => {
      const line = this.history.map((tokens, index) => `L${left + index} ${y(tokens[kind])}`);
      area.setAttribute("d", `M${left} 60 ${line.join(" ")} H${HISTORY} V60 Z`);
    });
    const words = (tokens) => Math.round(tokens).toLocaleString("en");
    byId("kv-now").textContent = `${words(used)} tokens held, ${words(kept)} kept, of ${words(total)}; top of the chart: ${words(top)}`;
  }
}

export class Steps {
  constructor() {
    this.steps = [];
  }

  show(steps) {
    if (!steps.length) return;
    this.steps = [...this.steps, ...steps].slice(-MAX_BARS);
    const most = Math.max(...this.steps.map((step) => step.num_decodes + step.num_prompt_tokens));
    const bars = this.steps.flatMap((step, index) => {
      const prefill = (58 * step.num_prompt_tokens) / most, decode = (58 * step.num_decodes) / most;
      const bar = (name, y, height) => shape("rect", { class: name, x: index, y: y.toFixed(2), width: 0.85, height: height.toFixed(2) });
      return [bar("decode", 60 - decode, decode), bar("prefill", 60 - decode - prefill, prefill)];
    });
    byId("steps").replaceChildren(...bars);
    const last = this.steps.at(-1);
    byId("steps-now").textContent = `step ${last.step}: ${count(last.num_decodes, "decode")}, ${count(last.num_prompt_tokens, "prompt token")}`;
  }
}

export function showRequests(requests, stats, ownRequests) {
  byId("requests-now").textContent = `${stats.running} running, ${stats.waiting} waiting`;
  byId("requests").tBodies[0].replaceChildren(...requests.map((request) => {
    const row = element("tr", ownRequests.has(request.id) ? "mine" : "");
    const prompt = element("td", "number", `${request.computed_tokens} / ${request.prompt_tokens} `);
    if (request.state === "prefill") {
      const progress = element("progress");
      progress.max = request.prompt_tokens;
      progress.value = request.computed_tokens;
      progress.setAttribute("aria-label", "prompt computed");
      prompt.append(progress);
    }
    row.append(
      element("td", "", ownRequests.has(request.id) ? `${request.id.slice(0, 20)} (yours)` : request.id.slice(0, 20)),
      element("td", "", request.state), prompt,
      element("td", "number", request.cached_tokens === null ? "–" : String(request.cached_tokens)),
      element("td", "number", String(request.output_tokens)), element("td", "number", duration(request.age_s)),
    );
    return row;
  }));
}

/** Percentiles of what came since the page was opened or, before anything did, since the server was started. */
export class Latency {
  constructor() {
    this.base = null;
  }

  show(histograms) {
    this.base ??= histograms;
    let since = "";
    byId("latency").tBodies[0].replaceChildren(...LATENCIES.map(([label, name]) => {
      const { bounds, counts } = histograms[name];
      const fresh = counts.map((value, index) => value - (this.base[name].counts[index] ?? 0));
      const chosen = fresh.some((value) => value > 0) ? fresh : counts;
      if (chosen === fresh) since = "since this page was opened";
      const row = element("tr");
      const head = element("th", "", label);
      head.scope = "row";
      row.append(head, ...[0.5, 0.9, 0.99].map((share) => element("td", "", milliseconds(percentile(bounds, chosen, share)))));
      return row;
    }));
    byId("latency-since").textContent = since || "since the start";
  }
}

/** By linear interpolation inside the bucket; null without values. */
export function percentile(bounds, counts, share) {
  const wanted = share * counts.reduce((sum, value) => sum + value, 0);
  if (!wanted) return null;
  let before = 0;
  for (let index = 0; index < counts.length; index++) {
    if (before + counts[index] >= wanted) {
      const low = index ? bounds[index - 1] : 0;
      return index < bounds.length ? low + ((bounds[index] - low) * (wanted - before)) / counts[index] : low;
    }
    before += counts[index];
  }
  return bounds.at(-1);
}

const milliseconds = (seconds) => (seconds === null ? "–" : (seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0));
