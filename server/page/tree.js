// The picture of the radix tree: kept true by replacing the nodes that events bring, and drawn as nested lists.

import { byId, count, duration, element } from "./dom.js";

const QUOTED = 60; // characters
const PASSING = new Set(["match", "lock", "unlock"]); // they end where the segment ends
export const MARKS = { match: "hit", insert: "new", split: "split", evict: "gone" };

export class Tree {
  constructor() {
    this.nodes = new Map(); // id -> what the engine told of it
    this.marks = new Map(); // id -> hit, new or split
    this.ghosts = []; // evicted by the last events, drawn once more
    this.drawn = new Map(); // id -> its elements
    this.pageSize = 1;
    this.withText = true;
  }

  replace(nodes) {
    this.nodes = new Map(nodes.map((node) => [node.id, node]));
    this.clearMarks();
  }

  clearMarks() {
    this.marks.clear();
    this.ghosts = [];
  }

  apply(event) {
    for (const id of event.gone) {
      const node = this.nodes.get(id);
      if (node) this.ghosts.push(node);
      this.nodes.delete(id);
    }
    for (const node of event.nodes) this.nodes.set(node.id, node);
    for (const [id, locks, uses] of event.counts) {
      const node = this.nodes.get(id);
      if (node) Object.assign(node, { locks, uses, used_at: event.kind === "match" ? event.at : node.used_at });
    }
    const mark = MARKS[event.kind];
    if (event.kind === "match") for (const [id] of event.counts) this.marks.set(id, mark);
    else if (event.kind === "split") for (const node of event.nodes) this.marks.set(node.id, mark);
    else if (mark) this.marks.set(event.node, mark);
  }

  /** What a segment says, in at most so many characters. */
  text(node, limit = 400) {
    if (!this.withText) return "";
    const head = node.head.length > limit ? `${node.head.slice(0, limit)}…` : node.head;
    return node.tail ? `${head} … ${node.tail}` : head;
  }

  draw(now) {
    const children = new Map([[0, []]]);
    const all = [...this.nodes.values(), ...this.ghosts];
    for (const node of all) {
      const parent = this.nodes.has(node.parent) ? node.parent : 0;
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(node);
    }
    const kept = new Set(all.map((node) => node.id));
    for (const id of this.drawn.keys()) if (!kept.has(id)) this.drawn.delete(id);
    byId("tree").replaceChildren(this.list(children, 0, now));
    byId("tree-now").textContent = this.summary();
  }

  summary() {
    if (!this.nodes.size) return "empty";
    let pages = 0, locked = 0, hidden = 0;
    const shown = new Map();
    for (const node of this.nodes.values()) {
      pages += node.num_pages;
      locked += node.locks > 0;
      shown.set(node.parent, (shown.get(node.parent) ?? 0) + 1);
    }
    for (const node of this.nodes.values()) hidden += node.num_children > (shown.get(node.id) ?? 0);
    const more = hidden ? ", more below some of them" : "";
    const secret = this.withText ? "" : "; texts are hidden (--page full shows them)";
    return `${count(this.nodes.size, "segment")}, ${count(pages, "page")} of ${count(this.pageSize, "token")}, `
      + `${locked} locked${more}${secret}`;
  }

  list(children, parent, now) {
    const list = element("ul");
    for (const node of children.get(parent) ?? []) {
      const item = element("li");
      item.append(this.row(node, now));
      if (children.has(node.id)) item.append(this.list(children, node.id, now));
      list.append(item);
    }
    return list;
  }

  row(node, now) {
    const drawn = this.drawn.get(node.id) ?? { row: element("div"), text: element("span", "text"), facts: element("span", "facts") };
    if (!drawn.row.firstChild) drawn.row.append(drawn.text, drawn.facts);
    this.drawn.set(node.id, drawn);
    const gone = !this.nodes.has(node.id);
    const mark = gone ? "gone" : this.marks.get(node.id) ?? "";
    drawn.row.className = `node ${mark} ${node.locks && !gone ? "locked" : ""}`;
    drawn.row.dataset.node = node.id;
    const text = this.text(node);
    if (drawn.text.textContent !== text) drawn.text.textContent = text;
    const age = node.used_at === null ? "" : `, used ${duration(Math.max(0, now - node.used_at))} ago`;
    const locks = node.locks ? `, ${count(node.locks, "lock")}` : "";
    drawn.facts.textContent = `${gone ? "evicted: " : ""}${count(node.num_tokens, "token")} on ${count(node.num_pages, "page")}`
      + `${locks}, ${count(node.uses, "use")}${age}`;
    return drawn.row;
  }

  /** What an event means, in words. Call it before ``apply``: an evicted node is still known. */
  describe(event) {
    const node = this.nodes.get(event.node) ?? event.nodes.find((told) => told.id === event.node);
    const whole = node && this.withText ? this.text(node) : "";
    const long = whole.length > QUOTED;
    const quoted = whole && (PASSING.has(event.kind)
      ? ` “${long ? "…" : ""}${whole.slice(-QUOTED)}”` : ` “${whole.slice(0, QUOTED)}${long ? "…" : ""}”`);
    const who = event.owner ? `Request ${event.owner.slice(0, 20)}` : "The engine";
    const tokens = count(event.num_tokens, "token");
    switch (event.kind) {
      case "match": return event.num_tokens
        ? `${who} finds its first ${tokens} in the tree; they end at${quoted}.`
        : `${who} finds nothing of its prompt in the tree.`;
      case "split": return `A segment is split after ${tokens}, where a prompt leaves it:${quoted} becomes a node of its own.`;
      case "insert": return `${who} adds ${tokens}:${quoted}`;
      case "evict": return `${tokens} are evicted${event.owner ? ` for request ${event.owner.slice(0, 20)}` : ""}:${quoted}`;
      case "lock": return `${who} locks the way from the root to${quoted}: nothing on it may be evicted.`;
      case "unlock": return `${who} unlocks the way to${quoted}.`;
      default: return event.kind;
    }
  }
}
