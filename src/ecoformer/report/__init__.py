"""What is reported: the paper's tables beside ours, and figures."""
