// Text from the model as elements. HTML in it stays text, pictures are not loaded, and links lead to http(s) alone.

import MarkdownIt from "./vendor/markdown-it.js";
import { highlight } from "./code.js";
import { button, copy, element } from "./dom.js";
import { formulas, typeset } from "./math.js";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: false }).disable("image").use(formulas);
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

// The elements of parsed blocks, which may be `growing`.
function elements(tokens, env, growing) {
  const holder = document.createElement("template");
  holder.innerHTML = parser.renderer.render(tokens, parser.options, env);
  for (const link of holder.content.querySelectorAll("a")) {
    link.rel = "noopener noreferrer";
    link.target = "_blank";
  }
  for (const code of holder.content.querySelectorAll("pre")) {
    highlight(code.firstElementChild, growing);
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
  for (const formula of holder.content.querySelectorAll(".math")) {
    if (formula.matches("div")) formula.tabIndex = 0;
    typeset(formula);
  }
  return [...holder.content.childNodes];
}

// Makes the children of `parent` from the place `kept` on those given. Those that are alike stay, and with them what is selected.
function replace(parent, kept, fresh) {
  const place = kept;
  while (kept < parent.childNodes.length && fresh[kept - place]?.isEqualNode(parent.childNodes[kept])) kept++;
  while (parent.childNodes.length > kept) parent.lastChild.remove();
  parent.append(...fresh.slice(kept - place));
}

export function render(text, parent) {
  const env = {};
  replace(parent, 0, elements(parser.parse(text, env), env, false));
}

const LINE_END = /\r\n?|\n/g;

// Where a line of a text begins.
function lineStart(text, line) {
  LINE_END.lastIndex = 0;
  for (; line > 0 && LINE_END.exec(text); line--);
  return LINE_END.lastIndex;
}

// A text that grows. What was added can change its last block only: those before it are neither parsed nor drawn again. (A
// link that is defined later is an exception; `render` makes it one when the text is complete.)
export class Draft {
  constructor(parent) {
    this.parent = parent;
    // Where the last block begins, in the text and among the children.
    this.settled = 0;
    this.kept = 0;
  }

  draw(text) {
    const rest = text.slice(this.settled);
    const env = {};
    const tokens = parser.parse(rest, env);
    const last = tokens.findLastIndex(({ level, map, nesting }) => level === 0 && map && nesting >= 0);
    const before = last > 0 ? elements(tokens.slice(0, last), env, false) : [];
    const growing = elements(tokens.slice(Math.max(last, 0)), env, true);
    replace(this.parent, this.kept, [...before, ...growing]);
    if (last <= 0) return;
    this.settled += lineStart(rest, tokens[last].map[0]);
    this.kept += before.length;
  }
}
