// Opens the page of `moeflux serve demo` in headless Chromium, uses it as a reader would, and takes pictures.
//
//   npm install
//   node check_page.mjs MOEFLUX [--chromium /usr/bin/chromium] [--pictures FOLDER]
//
// Fails on any error in the browser's console, on any request to another host, and if something does not work.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync } from "node:fs";
import { chromium } from "playwright-core";

const [binary, ...rest] = process.argv.slice(2);
const option = (name, otherwise) => (rest.includes(name) ? rest[rest.indexOf(name) + 1] : otherwise);
const executablePath = option("--chromium", "/usr/bin/chromium");
const pictures = option("--pictures");
if (pictures) mkdirSync(pictures, { recursive: true });

/// Less memory than all experts need, so that the disk shows too.
async function serve() {
  const server = spawn(binary, ["serve", "demo", "--port", "0", "--memory", "26MiB", "--sequences", "2", "--context", "1024"]);
  const url = await new Promise((resolve, reject) => {
    let said = "";
    server.stderr.on("data", (data) => {
      said += data;
      const found = /on (http:\/\/\S+)/.exec(said);
      if (found) resolve(found[1]);
    });
    server.on("exit", () => reject(new Error(`the server did not start: ${said}`)));
  });
  return { url, stop: () => server.kill() };
}

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

async function visit(browser, url, name, { width, height, scheme, phone = false }) {
  const context = await browser.newContext({
    viewport: { width, height }, colorScheme: scheme, hasTouch: phone, isMobile: phone, reducedMotion: "reduce",
  });
  const page = await context.newPage();
  const errors = [];
  page.on("console", (message) => { if (["error", "warning"].includes(message.type())) errors.push(message.text()); });
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("request", (request) => { if (!/^(data|blob):/.test(request.url()) && !request.url().startsWith(url)) errors.push(`asks ${request.url()}`); });
  await page.goto(url);
  const last = page.locator(".message.assistant").last();
  const say = async (text) => {
    await page.locator("#input").fill(text);
    await page.keyboard.press("Enter");
  };
  const ended = () => page.locator("#send").waitFor({ state: "visible", timeout: 120_000 });
  const setting = async (id, value) => {
    await page.locator("#show-settings").click();
    await page.locator(`#${id}`).fill(value);
    await page.locator("#settings button").click();
  };
  await setting("temperature", "0");

  // Chat.
  await page.locator("#model", { hasText: "demo" }).waitFor();
  await say("What is 17 + 25?");
  await last.locator(".facts").waitFor({ timeout: 60_000 });
  await ended();
  assert.match(await last.textContent(), /17 \+ 25 = 42/);

  // The heat map moves while an answer is written.
  if (phone) await page.locator("#show-engine").click();
  const heat = () => page.evaluate(() => document.getElementById("heat").toDataURL());
  await page.waitForTimeout(2500);
  const cold = await heat();
  await say("Tell me a short story about a fox.");
  await page.waitForFunction((cold) => document.getElementById("heat").toDataURL() !== cold, cold, { timeout: 60_000 });
  await ended();
  assert.match(await page.locator("#hits").textContent(), /^\d+\.\d %$/);
  if (pictures) await page.screenshot({ path: `${pictures}/${name}.png` });
  const layout = await page.evaluate(() => ({
    sideways: document.documentElement.scrollWidth - innerWidth,
    chat: document.getElementById("messages").clientHeight / innerHeight,
    engine: document.getElementById("engine").clientHeight / innerHeight,
    below: document.getElementById("form").getBoundingClientRect().bottom - innerHeight,
  }));
  assert.ok(layout.engine > 0.3, `${name}: ${layout.engine} of the height is left for the engine`);
  assert.ok(layout.below <= 0, `${name}: the message box is ${layout.below} below the screen`);
  assert.ok(layout.sideways <= 0, `${name}: scrolls sideways by ${layout.sideways}`);
  assert.ok(layout.chat > 0.25, `${name}: ${layout.chat} of the height is left for the conversation`);
  assert.deepEqual(await page.evaluate(contrasts), [], `${name}: contrast`);
  if (phone) await page.locator("#show-engine").click();

  // Stop, by button and by key.
  await setting("max_tokens", "900");
  await setting("temperature", "1.6");
  for (const stop of [() => page.locator("#stop").click({ timeout: 1000 }), () => page.keyboard.press("Escape")]) {
    const status = page.locator("#status");
    // An answer may end before it can be stopped.
    for (let tries = 0; tries < 6 && (await status.textContent()) !== "Stopped."; tries++) {
      await page.locator("#new").click();
      await say("Tell me a long story about two friends. Do not stop.");
      const begun = () => document.querySelector(".message.assistant:last-of-type")?.textContent.length > 20;
      await page.waitForFunction(begun, null, { timeout: 5000 }).catch(() => {});
      await stop().catch(() => {});
      await ended();
    }
    assert.equal(await status.textContent(), "Stopped.");
    await page.locator("#new").click();
  }

  // A new conversation, by key; settings stay.
  await page.keyboard.press("Control+Shift+O");
  assert.equal(await page.locator(".message").count(), 0);
  await page.reload();
  await page.locator("#show-settings").click();
  assert.equal(await page.locator("#max_tokens").inputValue(), "900");
  if (pictures) await page.screenshot({ path: `${pictures}/${name}-settings.png` });
  assert.deepEqual(await page.evaluate(contrasts), [], `${name}: contrast of the settings`);
  await page.keyboard.press("Escape");
  // Nothing but the keyboard.
  await page.locator("body").press("Tab");
  assert.ok(await page.evaluate(() => document.activeElement !== document.body));
  assert.deepEqual(errors, [], `${name}: errors in the console`);
  await context.close();
  console.log(`${name}: ok`);
}

const server = await serve();
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
try {
  await visit(browser, server.url, "light", { width: 1120, height: 700, scheme: "light" });
  await visit(browser, server.url, "dark", { width: 1120, height: 700, scheme: "dark" });
  await visit(browser, server.url, "phone", { width: 390, height: 780, scheme: "light", phone: true });
} finally {
  await browser.close();
  server.stop();
}
