// Text from the model as elements. HTML in it stays text, pictures are not loaded, and links lead to http(s) alone.

import MarkdownIt from "./vendor/markdown-it.js";
import { button, copy, element } from "./dom.js";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: false }).disable("image");
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (url) => /^https?:\/\//i.test(url);

// No part of the page takes styles from elements.
const plain = (name) => {
  const usual = parser.renderer.rules[name];
  parser.renderer.rules[name] = (tokens, at, options, env, self) => {
    const align = /text-align:(\w+)/.exec(tokens[at].attrGet("style") ?? "");
    tokens[at].attrs = align ? [["class", "to-" + align[1]]] : null;
    return usual ? usual(tokens, at, options, env, self) : self.renderToken(tokens, at, options);
  };
};
plain("th_open");
plain("td_open");

export function render(text, parent) {
  const holder = document.createElement("template");
  holder.innerHTML = parser.render(text);
  for (const link of holder.content.querySelectorAll("a")) {
    link.rel = "noopener noreferrer";
    link.target = "_blank";
  }
  for (const code of holder.content.querySelectorAll("pre")) {
    const copies = button("Copy", "Copy this code", () => copy(code.firstElementChild.textContent));
    copies.className = "copy";
    const frame = element("div", "code");
    code.replaceWith(frame);
    code.tabIndex = 0;
    frame.append(code, copies);
  }
  for (const table of holder.content.querySelectorAll("table")) {
    const frame = element("div", "table");
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  parent.append(holder.content);
}
