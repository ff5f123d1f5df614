"""The protocol between router and shards: `shard.proto` and the module generated from it by `scripts/proto`."""
