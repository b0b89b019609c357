"""What people see: pure functions from a `StatusReply` to rich renderables or plain lines."""
