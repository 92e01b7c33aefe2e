"""The life cycle of models on a worker.

```text
 repositories, repository API,         reconciler ──▶ transitions ──▶ loader ──▶ served_version ──▶ instances
 placement plan, composing models ──▶  (decides)      (load, swap,    (one model: configuration, versions)
                                           │           drain, unload)
                                           ▼                │
                                       model_state ◀────────┘ published as records in the registry
```

`placement` and `placement_rules` distribute models that declare resource needs, `coordination` has drains and rolling
reloads, `mirror`, `downloads` and `model_cache` keep copies of repositories that are not local, `override_folder` the files
of load requests.
"""
