// Keeps conversations, their messages and runs in the browser's database. Where there is none, as in some private windows,
// they last as long as the page. Each message is a record of its own, so that two tabs do not overwrite each other's.

const NAMES = ["talks", "messages", "runs"] as const
export type StoreName = (typeof NAMES)[number]
const VERSION = 2

/** Creates what is missing, and makes records of the messages that the first version kept inside of conversations. */
function upgrade(request: IDBOpenDBRequest): void {
  const { result: database, transaction } = request
  const isOld = database.objectStoreNames.contains("talks")
  for (const name of NAMES) {
    if (database.objectStoreNames.contains(name)) continue
    const store = database.createObjectStore(name, { keyPath: "id" })
    if (name === "messages") store.createIndex("talk", "talk")
  }
  if (!isOld) return
  const talks = transaction!.objectStore("talks")
  talks.openCursor().onsuccess = event => {
    const cursor = (event.target as IDBRequest<IDBCursorWithValue | null>).result
    if (!cursor) return
    const { messages = {}, ...talk } = cursor.value
    const shown: Record<string, string> = {}
    for (const [number, { children = [], shown: at = 0, pictures, ...message }] of (Object.values(messages) as any[]).entries()) {
      if (children[at]) shown[message.id] = children[at]
      if (message.id === "root") continue
      const files = message.files ?? pictures ?? [] // an earlier name
      transaction!.objectStore("messages").put({ ...message, files, talk: talk.id, made: talk.made + number, ended: "" })
    }
    cursor.update({ ...talk, shown })
    cursor.continue()
  }
}

const opened: Promise<IDBDatabase | null> = new Promise(resolve => {
  try {
    const request = indexedDB.open("bridle-playground", VERSION)
    request.onupgradeneeded = () => upgrade(request)
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close() // a newer page needs to change it
      resolve(request.result)
    }
    request.onerror = () => resolve(null)
  } catch {
    resolve(null)
  }
})

async function act<T>(name: StoreName, mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T | null> {
  const database = await opened
  if (!database) return null
  return new Promise(resolve => {
    try {
      const request = work(database.transaction(name, mode).objectStore(name))
      request.onsuccess = () => resolve(request.result)
      request.onerror = () => resolve(null)
    } catch {
      resolve(null) // the browser was told to forget everything
    }
  })
}

export const put = (name: StoreName, value: { id: string }) => act(name, "readwrite", store => store.put(value))
export const remove = (name: StoreName, id: string) => act(name, "readwrite", store => store.delete(id))
export const get = <T>(name: StoreName, id: string) => act<T | undefined>(name, "readonly", store => store.get(id))
export const keys = async (name: StoreName) => (await act(name, "readonly", store => store.getAllKeys()) ?? []) as string[]
/** The messages of one conversation. */
export const messagesOf = async <T>(talk: string) =>
  ((await act("messages", "readonly", store => store.index("talk").getAll(talk))) ?? []) as T[]

export async function all<T extends { made: number }>(name: StoreName): Promise<T[]> {
  const found = (await act(name, "readonly", store => store.getAll())) as T[] | null
  return (found ?? []).sort((a, b) => b.made - a.made)
}

// -- other tabs ------------------------------------------------------------------------------------------------

const channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("bridle-playground")

/** Tells the other tabs that a conversation has changed. */
export const announce = (talk: string) => channel?.postMessage({ talk })

/** Calls `then` with each conversation that another tab has changed. */
export function onAnnounced(then: (talk: string) => void): void {
  if (channel) channel.onmessage = event => then(String(event.data?.talk ?? ""))
}
