// The engine made visible: reads its event stream, and plays what happens in the tree live or slowly.

import { call, errorOf, eventsOf } from "./api.js";
import { Latency, Occupancy, showRequests, Steps } from "./charts.js";
import { byId, count, element } from "./dom.js";
import { MARKS, Tree } from "./tree.js";

const MAX_QUEUED = 4000;
const MAX_LISTED = 100;
const RETRY_MS = 2000;

export class Engine {
  constructor(ownRequests) {
    this.ownRequests = ownRequests;
    this.tree = new Tree();
    this.occupancy = new Occupancy();
    this.steps = new Steps();
    this.latency = new Latency();
    this.queue = []; // events, and whole pictures {picture}
    this.overflown = false;
    this.now = 0;
    byId("pause").addEventListener("click", () => this.setPaused(!this.paused));
    byId("step").addEventListener("click", () => this.playOne());
    byId("speed").addEventListener("change", () => this.schedule());
    byId("live").addEventListener("click", () => {
      byId("speed").value = "0";
      this.setPaused(false);
    });
    document.addEventListener("visibilitychange", () => {
      if (this.outOfSight) this.connection?.abort();
    });
  }

  /** In a tab in the background nobody looks, unless what is paused will be looked at later. */
  get outOfSight() {
    return document.hidden && !this.paused;
  }

  get paused() {
    return byId("pause").getAttribute("aria-pressed") === "true";
  }

  async watch() {
    for (;;) {
      while (this.outOfSight) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
      this.connection = new AbortController();
      this.begun = false;
      try {
        const response = await call("/engine/events", { signal: this.connection.signal });
        if (!response.ok) throw new Error(await errorOf(response));
        for await (const { event, data } of eventsOf(response)) {
          if (event === "view") this.onView(JSON.parse(data));
          if (event === "server") this.onServer(JSON.parse(data));
        }
      } catch (error) {
        if (error.name !== "AbortError") this.setHealth(false, `not connected: ${error.message}`);
      }
      if (!this.connection.signal.aborted) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  onServer({ health, latency }) {
    this.setHealth(health.status === "ok", health.status === "ok" ? "ready" : `${health.status}: ${health.reason}`);
    this.latency.show(latency);
  }

  setHealth(ok, text) {
    byId("health").dataset.ok = ok;
    if (byId("health").textContent !== text) byId("health").textContent = text;
  }

  onView(view) {
    // A view that was on its way when this page connected tells what changed in a picture that others have.
    this.begun ||= view.tree !== null;
    if (!this.begun) return;
    this.now = view.at;
    this.tree.pageSize = view.page_size;
    this.tree.withText = view.with_text;
    this.occupancy.show(view.stats);
    this.steps.show(view.steps);
    showRequests(view.requests, view.stats, this.ownRequests);
    if (this.queue.length > MAX_QUEUED) this.overflown = true;
    if (!this.overflown) {
      if (view.tree) this.queue.push({ picture: view.tree });
      this.queue.push(...view.events);
    }
    this.schedule();
  }

  setPaused(paused) {
    byId("pause").setAttribute("aria-pressed", paused);
    byId("pause").textContent = paused ? "Play" : "Pause";
    byId("step").disabled = !paused;
    this.schedule();
  }

  /** Live: everything at once. Slowly: one event, and the next after a while. Paused: nothing. */
  schedule() {
    clearTimeout(this.timer);
    const pauseMs = Number(byId("speed").value);
    // Read aloud only what is played slowly enough to listen to.
    byId("event-now").setAttribute("aria-live", this.paused || pauseMs ? "polite" : "off");
    if (!this.paused && pauseMs === 0) {
      // What was marked stays until there is something new to mark.
      if (this.queue.some((item) => item.kind in MARKS)) this.tree.clearMarks();
      while (this.queue.length) this.play(this.queue.shift());
      this.draw();
    } else if (!this.paused && this.queue.length) {
      this.timer = setTimeout(() => {
        this.playOne();
        this.schedule();
      }, pauseMs);
    }
    this.finish();
  }

  playOne() {
    const item = this.queue.shift();
    if (item) {
      this.tree.clearMarks();
      this.play(item);
      this.draw();
    }
    this.finish();
  }

  play(item) {
    if (item.picture) {
      this.tree.replace(item.picture);
      return;
    }
    const words = this.tree.describe(item);
    this.tree.apply(item);
    byId("event-now").textContent = words;
    const listed = element("li", this.ownRequests.has(item.owner) ? "mine" : "", words);
    listed.dataset.kind = item.kind;
    byId("events").prepend(listed);
    if (byId("events").childElementCount > MAX_LISTED) byId("events").lastElementChild.remove();
  }

  draw() {
    this.tree.draw(this.now);
  }

  /** When all that was kept is played although more had come, begin anew. */
  finish() {
    byId("queued").textContent = this.queue.length ? `${count(this.queue.length, "event")} behind` : "";
    if (this.overflown && !this.queue.length) {
      this.overflown = false;
      this.connection.abort();
    }
  }
}
