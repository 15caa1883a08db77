"""ZeRO and fully sharded data parallel."""
