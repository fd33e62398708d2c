// The conversation as the reader sees it. It follows what is being written until the reader scrolls up.

import { $, bytes, button, copy, element } from "./dom.js";
import { shown as shownFile } from "./files.js";
import { Draft, render } from "./markdown.js";

const log = $("messages");
let follow = true;
log.addEventListener("scroll", () => { follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60; });

export function toEnd(always) {
  if (always) follow = true;
  if (follow) log.scrollTop = log.scrollHeight;
}

export function clear() {
  for (const old of log.querySelectorAll(".message")) old.remove();
  $("empty").hidden = false;
}

function add(className) {
  $("empty").hidden = true;
  return log.appendChild(element("div", "message " + className));
}

const ENDS = {
  stopped: () => "Stopped.",
  cut: () => "The connection ended before the answer did.",
  failed: (message) => message.error,
};

// What the reader can do with a message: names of `actions`, by its role.
export function showUser(message, actions) {
  const shown = add("user");
  for (const file of message.files ?? []) shown.append(shownFile(file));
  shown.append(element("div", "text", message.text));
  shown.append(element("div", "actions",
    button("Edit", "Change this message and ask again", () => actions.edit(message)),
    button("Copy", "Copy this message", () => copy(message.text))));
}

function facts(usage) {
  const own = usage.moeflux;
  const parts = [`${usage.completion_tokens} tokens, ${own.tokens_per_second.toFixed(1)}/s`];
  parts.push(`first after ${own.first_token_seconds.toFixed(2)} s`);
  const cached = usage.prompt_tokens_details.cached_tokens;
  parts.push(`prompt ${usage.prompt_tokens}` + (cached ? ` (${cached} known)` : ""));
  const lookups = own.expert_hits + own.expert_misses;
  if (lookups) parts.push(`experts ${(100 * own.expert_hits / lookups).toFixed(1)} % in memory`);
  if (own.expert_bytes_read) parts.push(`${bytes(own.expert_bytes_read)} read`);
  return parts.join(" · ");
}

// An answer. While it is written `show` draws it again and again, at most a quarter of the time.
export class Answer {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.shown = add("assistant");
    this.body = this.shown.appendChild(element("div", "body"));
    this.draft = new Draft(this.body);
    this.progress = null;
    // The reasoning, its text, and whether the reader has opened or closed it.
    this.fold = null;
    this.thought = null;
    this.folded = false;
    // Whether it will be drawn soon, and after how many milliseconds at the earliest.
    this.drawn = false;
    this.pause = 0;
    this.ended = false;
  }

  begin() {
    this.shown.classList.add("working");
    toEnd(true);
  }

  update({ text, thought, progress, usage }) {
    this.message.text += text;
    this.message.thought += thought;
    this.progress = text || thought ? null : progress ?? this.progress;
    if (usage) this.message.facts = facts(usage);
    if (this.drawn) return;
    this.drawn = true;
    setTimeout(() => requestAnimationFrame(() => { if (!this.ended) this.show(); }), this.pause);
  }

  show() {
    this.drawn = false;
    const start = performance.now();
    const { text, thought } = this.message;
    if (thought) this.think(thought, !text);
    this.bar?.remove();
    this.bar = this.progress && this.reading();
    if (this.bar) this.body.before(this.bar);
    if (this.ended) render(text, this.body);
    else this.draft.draw(text);
    toEnd();
    this.pause = 3 * (performance.now() - start);
  }

  // Reasoning is open until the answer begins, or as the reader wants it.
  think(thought, open) {
    if (!this.fold) {
      this.thought = document.createTextNode("");
      const summary = element("summary", "", "Reasoning");
      summary.addEventListener("click", () => { this.folded = true; });
      this.fold = element("details", "", summary, this.thought);
      this.shown.prepend(this.fold);
    }
    // What is selected in a text stays so if it grows.
    this.thought.appendData(thought.slice(this.thought.length));
    if (!this.folded) this.fold.open = open;
  }

  reading() {
    const { processed, total } = this.progress;
    const bar = element("progress");
    bar.max = total;
    bar.value = processed;
    bar.setAttribute("aria-label", "Prompt read");
    return element("div", "facts", `Reading the prompt: ${processed} of ${total} tokens `, bar);
  }

  // The answer is complete, or will not be.
  end() {
    this.ended = true;
    this.progress = null;
    this.show();
    this.shown.classList.remove("working");
    const { end, facts: figures, text } = this.message;
    if (end) this.shown.append(element("p", end === "failed" ? "error" : "end", ENDS[end](this.message)));
    if (figures) this.shown.append(element("div", "facts", figures));
    const again = end === "failed" || end === "cut" ? "Retry" : "Regenerate";
    const actions = element("div", "actions", button(again, "Ask for this answer again", () => this.actions.again(this.message)));
    if (text) actions.append(button("Copy", "Copy this answer", () => copy(text)));
    this.shown.append(actions);
    toEnd();
  }
}

export function showAnswer(message, actions) {
  new Answer(message, actions).end();
}
