// The line to the gateway. Addresses are relative to the page, so that a base path and a proxy do no
// harm.

const PATIENCE = 10_000; // ms that a look at the route may take

export class Trouble extends Error {
  constructor(words, status) {
    super(words);
    this.status = status; // 0: no answer at all
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function wrong(answer) {
  const told = await answer.json().catch(() => null);
  return new Trouble(told?.error?.message ?? `The gateway answers ${answer.status}.`, answer.status);
}

// What is served here, by whom, and how they are doing.
export async function look(key) {
  const how = {
    headers: headers(key),
    cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE),
  };
  const answer = await fetch("v1/route", how).catch(() => null);
  if (answer === null) throw new Trouble("The gateway does not answer.", 0);
  if (!answer.ok) throw await wrong(answer);
  return answer.json();
}

// Asks for a text and gives what is said about it, event by event. Ends when the gateway has said all.
export async function* write(wish, key, signal) {
  const body = JSON.stringify(wish);
  const type = { "Content-Type": "application/json" };
  const how = { method: "POST", body, headers: { ...headers(key), ...type }, signal };
  const answer = await fetch("v1/watch", how);
  if (!answer.ok) throw await wrong(answer);
  let rest = "";
  for await (const chunk of pieces(answer.body.pipeThrough(new TextDecoderStream()))) {
    const events = (rest + chunk).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (data === undefined) continue; // a heartbeat
      const said = JSON.parse(data.slice(6));
      if (said.error) throw new Trouble(said.error.message, answer.status);
      yield said;
    }
  }
}

// Not every browser can go through a stream with `for await` yet.
async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
