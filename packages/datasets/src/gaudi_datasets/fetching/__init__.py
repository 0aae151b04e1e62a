"""Data from outside: files fetched and verified, archives unpacked member by member."""
