// Run the search's worker in a hidden frame where the site is opened as a file: browsers refuse workers there.
// The theme's worker speaks by postMessage and "message" events alone, and looks for the name IFrameWorker.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve());
      this.load(new URL(url, document.baseURI).href).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach(data => this.postMessage(data));
      });
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.scope.document.body.append(script);
      });
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() { this.scope.frameElement.remove(); }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
