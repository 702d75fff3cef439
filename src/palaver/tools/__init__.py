"""Tools that run: servers of the Model Context Protocol (MCP), their tools and their calls."""
