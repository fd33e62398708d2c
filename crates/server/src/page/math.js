// Formulas: $a$ and \(a\) in lines, $$a$$ and \[a\] on their own. They are TeX until the library has made them MathML.

import { late } from "./late.js";

const CLOSE = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$" };
// Longer ones stay TeX.
const MOST_LINES = 100;
const MOST_CHARACTERS = 4000;

const opening = (text, at) => Object.keys(CLOSE).find((open) => text.startsWith(open, at));
const isDisplay = (open) => open === "$$" || open === "\\[";

// Where the formula that opens at a place has its closing mark, or -1. Amounts ($5 and $6) and names ($HOME:$PATH) are none.
function closing(text, start, open) {
  const close = CLOSE[open];
  const first = start + open.length;
  if (open === "$" && (/\s/.test(text[first] ?? " ") || /\w/.test(text[start - 1] ?? ""))) return -1;
  const end = Math.min(text.length, first + MOST_CHARACTERS);
  for (let at = first; at < end; at++) {
    if (open === "$" && text[at] === "`") return -1;
    if (text.startsWith(close, at)) {
      if (open !== "$") return text.slice(first, at).trim() ? at : -1;
      if (at > first && !/\s/.test(text[at - 1]) && !/\w/.test(text[at + 1] ?? "")) return at;
    } else if (text[at] === "\\") {
      at++;
    }
  }
  return -1;
}

function inline(state, silent) {
  const { src, pos } = state;
  const open = opening(src, pos);
  const end = open ? closing(src, pos, open) : -1;
  if (end < 0) return false;
  state.pos = end + CLOSE[open].length;
  if (!silent) {
    const token = state.push("math_inline", "", 0);
    token.content = src.slice(pos, state.pos);
    token.markup = open;
  }
  return true;
}

function block(state, start, end, silent) {
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]).trimEnd();
  const open = opening(line(start), 0);
  if (!isDisplay(open) || state.sCount[start] - state.blkIndent >= 4) return false;
  const lines = [];
  for (let at = start; at < Math.min(end, start + MOST_LINES); at++) {
    if (at > start && (state.isEmpty(at) || state.sCount[at] < state.blkIndent)) return false;
    lines.push(line(at));
    const found = lines.at(-1).indexOf(CLOSE[open], at === start ? open.length : 0);
    if (found < 0) continue;
    const whole = lines.join("\n");
    if (found + CLOSE[open].length < lines.at(-1).length || closing(whole, 0, open) < 0) return false;
    if (silent) return true;
    const token = state.push("math_block", "", 0);
    token.block = true;
    token.content = whole;
    token.map = [start, at + 1];
    state.line = at + 1;
    return true;
  }
  return false;
}

// Teaches a parser of Markdown to know formulas.
export function formulas(parser) {
  const { escapeHtml } = parser.utils;
  parser.inline.ruler.before("escape", "math_inline", inline);
  parser.block.ruler.after("blockquote", "math_block", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  parser.renderer.rules.math_inline = (tokens, at) =>
    `<span class="math${isDisplay(tokens[at].markup) ? " display" : ""}">${escapeHtml(tokens[at].content)}</span>`;
  parser.renderer.rules.math_block = (tokens, at) => `<div class="math display">${escapeHtml(tokens[at].content)}</div>\n`;
}

async function load() {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL("vendor/temml.css", import.meta.url);
  document.head.append(style);
  return (await import("./vendor/temml.js")).default;
}

// Formulas that were made lately, by their TeX: a paragraph that grows is drawn again with all that it has.
const made = new Map();
const MOST_MADE = 500;

function make(library, tex, displayMode) {
  const key = `${displayMode} ${tex}`;
  if (!made.has(key)) {
    const holder = document.createElement("span");
    try {
      // Without trust nothing leads to other places, and no element gets a class, a style or a name of the model's choice.
      library.render(tex, holder, { displayMode, throwOnError: true, trust: false });
    } catch {
      // What is no TeX is shown as it came.
      holder.replaceChildren();
    }
    if (made.size === MOST_MADE) made.delete(made.keys().next().value);
    made.set(key, holder.firstChild);
  }
  return made.get(key)?.cloneNode(true);
}

export const typeset = late(load, (library, element) => {
  const source = element.textContent;
  const open = opening(source, 0);
  const formula = make(library, source.slice(open.length, -CLOSE[open].length), isDisplay(open));
  if (formula) element.replaceChildren(formula);
});
