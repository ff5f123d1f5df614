// Long work in short turns, between which the browser does what waits: it shows a picture, takes a key.

/** How long a turn may last, in milliseconds. */
const TURN = 12

function breathe(): Promise<void> {
  return new Promise(resolve => {
    const { port1, port2 } = new MessageChannel()
    port1.onmessage = () => {
      port1.close()
      resolve()
    }
    port2.postMessage(null)
  })
}

/** Ends a turn that has lasted long enough, if it is called after each small piece of the work. */
export class Turns {
  private began = performance.now()

  get isOver(): boolean {
    return performance.now() - this.began > TURN
  }

  async next(): Promise<void> {
    await breathe()
    this.began = performance.now()
  }
}
