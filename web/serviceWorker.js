// Service worker: keeps the files of one build, so that the page opens without a network. A navigation always asks the
// server first, so a new build is shown at once. API requests are left to the browser. The build fills in BUILD.

const BUILD = { version: "", entry: "", files: [] };
const ROOT = new URL("./", self.location.href).href;
const PREFIX = `chatcache-shell ${new URL(ROOT).pathname} `;
const CACHE = PREFIX + BUILD.version;

self.addEventListener("install", (event) => event.waitUntil(install()));
self.addEventListener("activate", (event) => event.waitUntil(activate()));
self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method !== "GET" || !request.url.startsWith(ROOT)) return;
  const path = request.url.slice(ROOT.length).replace(/[?#].*/, "");
  if (path === "") event.respondWith(networkFirst(request));
  else if (path.startsWith("assets/")) event.respondWith(cacheFirst(request));
  else if (BUILD.files.includes(path)) event.respondWith(networkFirst(request));
});

/** Store all files of the build. Fails, to be tried again, if the server has another build by now. */
async function install() {
  const page = await fetch(ROOT, { cache: "no-cache" });
  if (!page.ok || !(await page.clone().text()).includes(BUILD.entry)) throw new Error("the page is of another build");
  const cache = await caches.open(CACHE);
  await cache.put(ROOT, page);
  await cache.addAll(BUILD.files.map((name) => new URL(name, ROOT).href));
  await self.skipWaiting();
}

/** Remove the files of older builds. */
async function activate() {
  for (const name of await caches.keys()) if (name.startsWith(PREFIX) && name !== CACHE) await caches.delete(name);
  await self.clients.claim();
}

async function networkFirst(request) {
  try {
    return await fetch(request);
  } catch (error) {
    const stored = await (await caches.open(CACHE)).match(request, { ignoreSearch: true });
    if (stored) return stored;
    throw error;
  }
}

/** File names contain a hash of the content, so a stored file is never out of date. */
async function cacheFirst(request) {
  const cache = await caches.open(CACHE);
  const stored = await cache.match(request);
  if (stored) return stored;
  const response = await fetch(request);
  if (response.status === 200) await cache.put(request, response.clone());
  return response;
}
