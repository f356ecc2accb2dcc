"""How messages come to a server: sessions, seals, parts, gRPC and the sockets of a host."""
