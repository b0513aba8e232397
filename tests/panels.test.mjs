// Python in a browser (Pyodide, here in Node) must answer with CPython's bytes, through the same
// start as the worker of the page.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { loadPyodide } from "pyodide";

import { startPanels } from "../book/_static/live-python.js";

const folder = mkdtempSync(join(tmpdir(), "panels-"));
const writer = fileURLToPath(new URL("panel_cases.py", import.meta.url));
let cases;
let answer;

before(async () => {
  const python = process.env.PYTHON ?? "python3";
  const written = spawnSync(python, [writer, folder], { encoding: "utf8" });
  assert.equal(written.status, 0, written.stderr);
  cases = JSON.parse(readFileSync(join(folder, "cases.json"), "utf8"));
  const zip = Uint8Array.from(readFileSync(join(folder, "parlab.zip")));
  answer = await startPanels(loadPyodide, zip.buffer);
});

after(() => rmSync(folder, { recursive: true }));

test("every panel answers its defaults and corners with CPython's bytes", () => {
  assert.ok(cases.length > 15, `only ${cases.length} cases`);
  for (const { question, answer: expected } of cases) {
    assert.equal(answer(question), expected, question);
  }
});

test("a wrong question raises an error that names what is wrong", () => {
  const indices = { n_ranks: 0, step: 0 };
  const question = { panel: "ring_stepper", indices, constants: { shift: "x" } };
  assert.throws(() => answer(JSON.stringify(question)), /shift|TypeError/);
});
