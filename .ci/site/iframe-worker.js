// A browser starts no worker for a page that it has opened from a file. The search of the site runs in a worker, so give it a frame instead.
(() => {
  if (location.protocol !== "file:") return;

  // Runs in the frame: what a worker's script expects to find there.
  function prepare() {
    window.postMessage = (data) => parent.dispatchEvent(new CustomEvent("frame-message", { detail: { from: window, data } }));
    window.importScripts = (...urls) =>
      urls.reduce(
        (before, url) =>
          before.then(
            () =>
              new Promise((resolve, reject) => {
                const script = document.createElement("script");
                Object.assign(script, { src: url, onload: resolve, onerror: reject });
                document.body.appendChild(script);
              }),
          ),
        Promise.resolve(),
      );
  }

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      this.listener = ({ detail }) => {
        if (detail.from !== inner) return;
        const event = new MessageEvent("message", { data: detail.data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      addEventListener("frame-message", this.listener);
      inner.document.open();
      inner.document.write(`<body><script>(${prepare})()</${"script"}><script src="${url}"></${"script"}></body>`);
      inner.document.close();
      // Not before open(), which removes all listeners.
      this.loaded = new Promise((resolve) => (inner.onload = resolve));
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }

    terminate() {
      removeEventListener("frame-message", this.listener);
      this.frame.remove();
    }
  }

  window.IFrameWorker = window.Worker = FrameWorker;
})();
