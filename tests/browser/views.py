"""Every view by its address, for an admin of all tenants, with an adapter `shown` that has two versions."""

VIEWS = {
    "overview": "#/",
    "adapters": "#/adapters",
    "no adapters found": "#/adapters?q=there-is-no-such-thing",
    "adapter": "#/adapters/shown",
    "another version": "#/adapters/shown?v=2",
    "traffic": "#/adapters/shown?tab=traffic",
    "how to use it": "#/adapters/shown?tab=use",
    "upload": "#/upload",
    "playground": "#/playground?columns=,shown",
    "playground with a schema": "#/playground?columns=,shown&format=schema",
    "live": "#/live",
    "requests": "#/requests",
    "usage": "#/requests/usage",
    "audit": "#/requests/audit",
    "tenants": "#/access",
    "keys": "#/access/keys?of=all",
    "usage of all tenants": "#/access/usage?by=tenant&span=7d",
    "settings": "#/settings",
    "no such page": "#/nowhere",
}
