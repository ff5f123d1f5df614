// Keeps conversations and runs in the browser's database. Where there is none, as in some private windows, they last as
// long as the page.

const NAMES = ["talks", "runs"] as const
export type StoreName = (typeof NAMES)[number]

const opened: Promise<IDBDatabase | null> = new Promise(resolve => {
  try {
    const request = indexedDB.open("bridle-playground", 1)
    request.onupgradeneeded = () => NAMES.forEach(name => request.result.createObjectStore(name, { keyPath: "id" }))
    request.onsuccess = () => resolve(request.result)
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
export const clear = (name: StoreName) => act(name, "readwrite", store => store.clear())
export const get = <T>(name: StoreName, id: string) => act<T | undefined>(name, "readonly", store => store.get(id))
export const keys = async (name: StoreName) => (await act(name, "readonly", store => store.getAllKeys()) ?? []) as string[]
export async function all<T extends { made: number }>(name: StoreName): Promise<T[]> {
  const found = (await act(name, "readonly", store => store.getAll())) as T[] | null
  return (found ?? []).sort((a, b) => b.made - a.made)
}
