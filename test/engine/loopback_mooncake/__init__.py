"""A folder for the path of servers that are to find a stand-in for Mooncake's client."""
