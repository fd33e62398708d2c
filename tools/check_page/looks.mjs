// How the page looks: contrast, what axe finds, what is on the screen.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/// What a person who cannot see well needs: text against its ground as WCAG asks (4.5 : 1).
const contrasts = () => {
  const parse = (colour) => colour.match(/[\d.]+/g).map(Number);
  const luminance = ([r, g, b]) =>
    [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
      .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.9) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.tagName === "OPTION") continue;
    const [a, b] = [parse(getComputedStyle(node).color), ground(node)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName}#${node.id}.${node.className} ${ratio.toFixed(2)}`);
  }
  return poor;
};

export async function isAccessible({ page }, name) {
  assert.deepEqual(await page.evaluate(contrasts), [], `${name}: contrast`);
  // The page's policy lets no other script in; what the browser is told to evaluate passes.
  await page.evaluate(axe);
  const found = await page.evaluate(async () => (await globalThis.axe.run()).violations.map(
    ({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(" ")}`));
  assert.deepEqual(found, [], `${name}: axe`);
}

export async function fits({ page }, name) {
  const layout = await page.evaluate(() => ({
    sideways: Math.max(document.documentElement.scrollWidth, innerWidth) - screen.width,
    chat: document.getElementById("messages").clientHeight / innerHeight,
    engine: document.getElementById("engine").clientHeight / innerHeight,
    below: document.getElementById("form").getBoundingClientRect().bottom - innerHeight,
  }));
  assert.ok(layout.engine > 0.3, `${name}: ${layout.engine} of the height is left for the engine`);
  assert.ok(layout.below <= 0, `${name}: the message box is ${layout.below} below the screen`);
  assert.ok(layout.sideways <= 0, `${name}: scrolls sideways by ${layout.sideways}`);
  assert.ok(layout.chat > 0.25, `${name}: ${layout.chat} of the height is left for the conversation`);
}
