"""Reading the arenas of other nodes, one-sided, over RDMA or TCP."""
