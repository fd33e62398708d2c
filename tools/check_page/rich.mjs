// Code in colours, formulas, and texts of many blocks while they are written.

import assert from "node:assert/strict";
import { isAccessible } from "./looks.mjs";

const CODE = "```python\n# A comment\ndef area(r: float) -> float:\n    return 3.14 * r ** 2 if r else \"none\"\n```\n\n"
  + "```nolanguage\ndef plain(): pass\n```\n\n```\n<b>also</b> plain\n```\n\n"
  + "```html\n<script>alert(1)</script><img src=x onerror=alert(2)>\n```\n";
const MATH = "Inline $x^2$ and \\(\\frac{a}{b}\\), costs $5 and $6, `$code$`, $HOME/bin:$PATH.\n\n"
  + "\\[\na = b\n- c\n\\]\n\n$$\\sum_{i=1}^n i$$\n\n- In a list\n  $$\n  \\alpha'\n  $$\n\n| a | b |\n|--|--|\n| $y$ | \\(z\\) |\n\n"
  + "Wrong: $\\frac{1$ and $\\nosuchcommand$. Bad: $\\href{javascript:alert(1)}{x}$ $\\includegraphics{http://other.example/p.png}$ "
  + "$\\class{message}{y}$ $\\style{position:fixed}{z}$";

/// Code of known languages has colours, other code none; formulas are MathML. What is needed for that is loaded then.
export async function showsCodeAndMath(visit, picture, name) {
  const { page, last } = visit;
  const loaded = () => page.evaluate(() => performance.getEntriesByType("resource").map(({ name }) => name.split("/").at(-1)));
  await visit.answer({ text: "Plain **words**." });
  await visit.say("Talk");
  await visit.ended();
  for (const late of ["highlight.js", "temml.js", "temml.css"]) assert.ok(!(await loaded()).includes(late), `${late} is loaded at once`);
  await visit.answer({ text: CODE + "\n" + MATH });
  await visit.say("Show me");
  await visit.ended();
  await last.locator(".hljs-keyword").first().waitFor();
  await last.locator("math").first().waitFor();
  const counts = {
    ".language-python .hljs-comment": 1, ".language-nolanguage *": 0, "pre code:not([class]) *": 0, "pre b, script, img": 0,
    "p math": 2, "div.math math[display=block]": 3, "li div.math": 1, "td math": 2, "mfrac": 1, "a[href]": 0,
    "math .message, math [style*=position]": 0,
  };
  for (const [selector, count] of Object.entries(counts)) assert.equal(await last.locator(selector).count(), count, selector);
  const text = await last.locator(".body").innerText();
  for (const left of ["costs $5 and $6", "$code$", "$HOME/bin:$PATH", "$\\frac{1$", "$\\nosuchcommand$", "$\\href{javascript:alert(1)}{x}$"]) {
    assert.ok(text.includes(left), `${left}: ${text}`);
  }
  const colours = await last.locator(".language-python").evaluate((code) =>
    new Set([code, ...code.querySelectorAll("*")].map((part) => getComputedStyle(part).color)).size);
  assert.ok(colours >= 5, `${colours} colours`);
  await picture(name);
  await isAccessible(visit, name);
  await page.locator("#show-settings").click();
  await page.locator("#theme").selectOption(await page.evaluate(() => matchMedia("(prefers-color-scheme: dark)").matches) ? "light" : "dark");
  await page.locator("#settings button").click();
  await isAccessible(visit, `${name}, the other theme`);

  // They are there as well in a conversation that is opened again.
  await page.reload();
  await page.locator("#chat-list .title").click();
  await last.locator(".hljs-keyword").first().waitFor();
  await last.locator("math").first().waitFor();
}

/// Blocks of a text that grows are drawn once, as they would be at once; the last is drawn while it grows.
export async function drawsBlocksOnce({ page }) {
  const found = await page.evaluate(async (parts) => {
    const { Draft, render } = await import("./markdown.js");
    const [whole, grown] = [document.createElement("div"), document.createElement("div")];
    document.body.append(grown);
    // Both libraries are there, so that what is compared is final.
    render(parts.join(""), whole);
    for (let tries = 0; tries < 100 && !(whole.querySelector("math") && whole.querySelector(".hljs-keyword")); tries++) {
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
    const text = parts.join("");
    const draft = new Draft(grown);
    const different = [];
    for (let end = 1; end <= text.length; end += 7) {
      draft.draw(text.slice(0, end));
      const once = document.createElement("div");
      render(text.slice(0, end), once);
      if (once.innerHTML !== grown.innerHTML) different.push(text.slice(Math.max(0, end - 60), end));
    }
    const kept = grown.firstChild;
    draft.draw(text);
    const same = kept === grown.firstChild;
    grown.remove();

    // A text ten times as long takes about ten times as long, not a hundred times.
    const time = (blocks) => {
      const many = new Draft(document.createElement("div"));
      let long = "";
      const start = performance.now();
      for (let block = 0; block < blocks; block++) many.draw(long += "A paragraph of *some* words, with `code` and $x$.\n\n");
      return performance.now() - start;
    };
    time(50);
    return { different, same, math: whole.querySelectorAll("math").length, ratio: time(1500) / time(150) };
  }, [CODE, "\n", MATH, "\n\n# Title\n\n> quote\nlazy\n\n1. one\n2. two\n\n   more\n\ntext\n===\n\n---\n\n    indented\n\nlast\n- item\n"]);
  assert.deepEqual(found.different, []);
  assert.ok(found.same && found.math > 5, JSON.stringify(found));
  assert.ok(found.ratio < 40, `ten times the text takes ${found.ratio.toFixed(0)} times as long`);
}
