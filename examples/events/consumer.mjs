// Show the results of a model's durable requests as they come, each once, whoever published them.
//
//     node consumer.mjs [--url=nats://localhost:4222] [--model=file_kind] [--name=shower] [--count=10]
//
// The broker remembers under `--name` what was shown: a consumer that is started again goes on where it was.
import { parseArgs } from "node:util";

import { AckPolicy, jetstream, jetstreamManager } from "@nats-io/jetstream";
import { connect } from "@nats-io/transport-node";

const { values } = parseArgs({
  options: {
    url: { type: "string", default: process.env.NATS_URL ?? "nats://localhost:4222" },
    model: { type: "string", default: "file_kind" },
    name: { type: "string", default: "shower" },
    count: { type: "string", default: "Infinity" },
  },
});

function outputsOf(record) {
  const object = record.headers.get("Weir-Object");
  if (object) return `(object ${object} of store results)`;
  const length = record.headers.get("Inference-Header-Content-Length");
  const answer = JSON.parse(Buffer.from(length ? record.data.subarray(0, Number(length)) : record.data).toString());
  if (answer.error !== undefined) return answer.error;
  return answer.outputs.map((output) => `${output.name} ${JSON.stringify(output.data ?? output.shape)}`).join(" ");
}

const { host, username, password } = new URL(values.url);
const client = await connect({ servers: host, user: username, pass: password });
const manager = await jetstreamManager(client);
await manager.consumers.add("RESULT", {
  durable_name: values.name,
  filter_subject: `result.${values.model}.*`,
  ack_policy: AckPolicy.Explicit,
});
const results = await jetstream(client).consumers.get("RESULT", values.name);
let shown = 0;
for await (const record of await results.consume()) {
  const told = (name) => record.headers.get(name);
  const ms = Number(told("Weir-Ended-Ms")) - Number(told("Weir-Accepted-Ms"));
  console.log(`${told("Weir-Id")}  ${told("Weir-Outcome")}  ${ms} ms  ${outputsOf(record)}`);
  record.ack(); // only now: what was not shown comes again
  if (++shown >= Number(values.count)) break;
}
await client.drain();
