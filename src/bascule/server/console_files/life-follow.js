// Asks what happened to a message until the message has ended.

export const PAUSE_MS = 2000;
export const PAUSES = 4; // the pause is at least this many times as long as the search
const MAY_PASS = [0, 503]; // states of errors after which the broker is asked again

function waited(ms, signal) {
  return new Promise((resolve) => {
    if (signal.aborted) {
      resolve();
      return;
    }
    const timer = setTimeout(done, ms);
    function done() {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    }
    signal.addEventListener("abort", done);
  });
}

// Calls `show` with each answer of `search`, and whether another search follows, and `fail` with each error. Ends when the message has ended
// in two answers one after the other, since the last events may be younger than the first of these; also when `follows` returns false, when
// an error will not pass, and when `signal` is aborted. While `hidden` returns true, the broker is not asked.
export async function followLife({ search, show, fail, follows, signal, hidden = () => document.hidden, wait = waited, now = () => performance.now() }) {
  for (let ended = false; ;) {
    const begun = now();
    try {
      const life = await search();
      if (signal.aborted) return;
      const over = ended && life.ended;
      ended = life.ended;
      show(life, follows() && !over);
      if (over) return;
    } catch (error) {
      if (signal.aborted) return;
      fail(error);
      if (!MAY_PASS.includes(error.status)) return;
    }
    if (!follows()) return;
    await wait(Math.max(PAUSE_MS, PAUSES * (now() - begun)), signal);
    while (hidden() && !signal.aborted) await wait(PAUSE_MS, signal);
    if (signal.aborted || !follows()) return;
  }
}
