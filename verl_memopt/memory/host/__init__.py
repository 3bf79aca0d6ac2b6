"""Host memory: page-locked buffers and their arena."""
