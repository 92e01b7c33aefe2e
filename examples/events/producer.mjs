// Publish files to model `file_kind`, to be recognised whenever there is time: many at once, each acknowledged.
//
//     node producer.mjs [--url=nats://localhost:4222] [--window=256] file ...
//
// A file that is acknowledged is on disk and will have its result; consumer.mjs shows them.
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { parseArgs } from "node:util";

import { jetstream } from "@nats-io/jetstream";
import { connect, headers } from "@nats-io/transport-node";

const TRIES = 10;

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { url: { type: "string", default: process.env.NATS_URL ?? "nats://localhost:4222" }, window: { type: "string", default: "256" } },
});

const { host, username, password } = new URL(values.url);
const client = await connect({ servers: host, user: username, pass: password });
const js = jetstream(client);
const waiting = [...positionals];
let duplicates = 0;

async function publish(path) {
  const file = await readFile(path);
  const given = { name: "FILE", datatype: "BYTES", shape: [1, 1], parameters: { binary_data_size: 4 + file.length } };
  const best = { name: "KIND", parameters: { classification: 1 } };
  const header = Buffer.from(JSON.stringify({ inputs: [given], outputs: [best], parameters: { path } }));
  const length = Buffer.alloc(4);
  length.writeUInt32LE(file.length);
  const body = Buffer.concat([header, length, file]);
  const told = headers();
  told.set("Inference-Header-Content-Length", String(header.length));
  // The id is a digest of the content, so that nothing is asked twice, however often it is published.
  const msgID = createHash("sha256").update(body).digest("hex").slice(0, 16);
  for (let tried = 0; ; tried++) {
    try {
      return await js.publish("event.file_kind", body, { msgID, headers: told });
    } catch (error) {
      if (tried === TRIES - 1) throw error;
      await new Promise((resolve) => setTimeout(resolve, 100 * 2 ** tried));
    }
  }
}

async function publishInTurn() {
  for (let path = waiting.shift(); path !== undefined; path = waiting.shift()) {
    duplicates += (await publish(path)).duplicate ? 1 : 0;
  }
}

await Promise.all(Array.from({ length: Number(values.window) }, publishInTurn));
console.log(`${positionals.length} files are on disk; ${duplicates} of them were published before`);
await client.close();
