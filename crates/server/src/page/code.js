// Code in colours, if its language is known.

import { late } from "./late.js";

// Longer ones stay plain, in characters; those that are still written are coloured again whenever they grow.
const LONGEST = 100_000;
const LONGEST_GROWING = 20_000;

const language = (code) => /^language-(.+)/.exec(code.className)?.[1];

const colour = late(async () => (await import("./vendor/highlight.js")).default, (library, code) => {
  if (!library.getLanguage(language(code))) return;
  // The library escapes what it does not mark.
  code.innerHTML = library.highlight(code.textContent, { language: language(code), ignoreIllegals: true }).value;
});

export function highlight(code, growing) {
  if (language(code) && code.textContent.length <= (growing ? LONGEST_GROWING : LONGEST)) colour(code);
}
