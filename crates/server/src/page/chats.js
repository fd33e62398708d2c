// The list of conversations.

import { $, button, download, element } from "./dom.js";
import * as store from "./store.js";

const wide = matchMedia("(min-width: 1180px)");

export class Chats {
  // `open` is called with a conversation that the reader chose, `removed` with the id of one that is gone.
  constructor({ open, removed }) {
    this.open = open;
    this.removed = removed;
    this.show(wide.matches);
    $("show-chats").addEventListener("click", () => this.show($("chats").hidden));
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !wide.matches && !$("chats").hidden && $("chats").contains(document.activeElement)) {
        // It is no answer that is to be stopped.
        event.stopImmediatePropagation();
        this.show(false);
        $("show-chats").focus();
      }
    });
  }

  show(visible) {
    $("chats").hidden = !visible;
    $("show-chats").setAttribute("aria-expanded", String(visible));
  }

  // Lists them anew; `current` is the one on the page.
  async list(current) {
    const all = await store.all();
    $("chat-list").replaceChildren(...all.map((conversation) => this.entry(conversation, conversation.id === current.id)));
    $("no-chats").hidden = all.length > 0;
  }

  entry(conversation, isCurrent) {
    const title = store.titleOf(conversation);
    const choose = button(title, title, () => {
      if (!wide.matches) this.show(false);
      this.open(conversation.id);
    });
    choose.className = "title";
    if (isCurrent) choose.setAttribute("aria-current", "true");
    const entry = element("li", isCurrent ? "current" : "", choose);
    const action = (label, does, act) => {
      const made = button(label, `${does}: ${title}`, act);
      made.setAttribute("aria-label", `${does}: ${title}`);
      return made;
    };
    entry.append(element("div", "actions",
      action("Rename", "Rename", () => this.rename(entry, conversation, isCurrent)),
      action("Markdown", "Save as Markdown", () => download("conversation.md", "text/markdown", store.asMarkdown(conversation))),
      action("JSON", "Save as JSON",
        () => download("conversation.json", "application/json", JSON.stringify(conversation, null, 2))),
      action("Delete", "Delete", async () => {
        if (!confirm(`Delete “${title}”?`)) return;
        await store.remove(conversation.id);
        this.removed(conversation.id);
      })));
    return entry;
  }

  rename(entry, conversation, isCurrent) {
    const field = element("input");
    field.value = store.titleOf(conversation);
    field.setAttribute("aria-label", "Name of the conversation");
    let done = false;
    const end = async (keep) => {
      if (done) return;
      done = true;
      const title = field.value.trim();
      if (keep && title) await store.rename(conversation, title);
      entry.replaceWith(this.entry(conversation, isCurrent));
      if (keep && isCurrent) this.renamed?.(title);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    field.addEventListener("blur", () => end(true));
    entry.firstElementChild.replaceWith(field);
    field.select();
  }
}
