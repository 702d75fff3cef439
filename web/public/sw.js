// Lets the page be installed and opened while the server is away. It keeps the page's own files, and never an answer of
// the API: what is said is on the server.
const CACHE = 'palaver-page'

self.addEventListener('install', () => self.skipWaiting())
self.addEventListener('activate', (event) => event.waitUntil(self.clients.claim()))

self.addEventListener('fetch', (event) => {
  const { request } = event
  const here = new URL('./', self.location.href)
  const url = new URL(request.url)
  if (request.method !== 'GET' || url.origin !== here.origin || !url.pathname.startsWith(here.pathname)) return
  const name = url.pathname.slice(here.pathname.length)
  if (name.startsWith('assets/')) event.respondWith(keptFirst(request))
  else if (name === '' && request.mode === 'navigate') event.respondWith(freshFirst(request))
})

/** The names of assets change with what is in them. */
async function keptFirst(request) {
  const cache = await caches.open(CACHE)
  const kept = await cache.match(request)
  if (kept) return kept
  const response = await fetch(request)
  if (response.ok) await cache.put(request, response.clone())
  return response
}

async function freshFirst(request) {
  const cache = await caches.open(CACHE)
  try {
    const response = await fetch(request)
    if (response.ok) {
      await cache.put('./', response.clone())
      await tidy(cache, await response.clone().text())
    }
    return response
  } catch (error) {
    const kept = await cache.match('./')
    if (kept) return kept
    throw error
  }
}

/** Drops the assets of pages that were: a page names its first ones, and those name the others. */
async function tidy(cache, html) {
  const entry = /assets\/index-[\w-]+\.js/.exec(html)?.[0]
  const last = await (await cache.match('./entry'))?.text()
  if (!entry || entry === last) return
  for (const request of await cache.keys()) if (request.url.includes('/assets/')) await cache.delete(request)
  await cache.put('./entry', new Response(entry))
}
