import { readdirSync, readFileSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { gzipSync } from 'node:zlib'
import { svelte } from '@sveltejs/vite-plugin-svelte'
import type { Plugin } from 'vite'
import { defineConfig } from 'vitest/config'

const OUT = '../src/palaver/server/page/dist'

/** Formulas need their fonts in one form, which every browser of the last ten years reads. */
function oneFontForm(): Plugin {
  return {
    name: 'one-font-form',
    enforce: 'pre',
    transform(code, id) {
      if (!id.includes('katex.min.css')) return null
      return { code: code.replace(/,url\([^)]*\.(?:woff|ttf)\) format\("(?:woff|truetype)"\)/g, ''), map: null }
    },
  }
}

/** Every text file packed beside itself, so that the server packs nothing while people wait. */
function packed(): Plugin {
  return {
    name: 'packed',
    apply: 'build',
    closeBundle() {
      const out = join(import.meta.dirname, OUT)
      for (const name of readdirSync(out, { recursive: true, encoding: 'utf8' })) {
        if (!/\.(js|css|html|svg|webmanifest)$/.test(name)) continue
        writeFileSync(join(out, `${name}.gz`), gzipSync(readFileSync(join(out, name)), { level: 9 }))
      }
    },
  }
}

// Every address is relative: the page works under any path that a proxy serves it at.
export default defineConfig({
  base: './',
  plugins: [svelte(), oneFontForm(), packed()],
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: 'es2022',
    assetsInlineLimit: 0, // the page's policy allows no data: fonts or styles
    chunkSizeWarningLimit: 700,
    modulePreload: { polyfill: false },
  },
  test: { include: ['tests/**/*.test.ts'], environment: 'node', testTimeout: 120_000 }, // a busy machine is no failure
})
