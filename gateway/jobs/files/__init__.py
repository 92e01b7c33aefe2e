"""The files of offline jobs: what is read item by item, and the shards that are written."""
