// The archive that a file is (fuser/runtime/archive.py): a line of text, an index, members at multiples of 64 bytes.
// Digests are checked when a member is read; signatures are not: keep files where only those write whom you trust.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>

// BLAKE2b of 32 bytes (RFC 7693), in hexadecimal.
inline std::string blake2b(const unsigned char* data, size_t size) {
  static const uint64_t iv[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                 0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  static const unsigned char sigma[10][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
      {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
      {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
      {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
      {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
  static const unsigned char mixed[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14}, {3, 7, 11, 15},
                                            {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13},  {3, 4, 9, 14}};
  auto turn = [](uint64_t x, int n) { return x >> n | x << (64 - n); };
  uint64_t h[8];
  memcpy(h, iv, sizeof h);
  h[0] ^= 0x01010020;
  size_t done = 0;
  do {
    size_t n = size - done < 128 ? size - done : 128;
    unsigned char block[128] = {};
    if (n) memcpy(block, data + done, n);
    done += n;
    uint64_t v[16], m[16];
    memcpy(m, block, sizeof m);
    memcpy(v, h, sizeof h);
    memcpy(v + 8, iv, sizeof iv);
    v[12] ^= done;
    if (done == size) v[14] = ~v[14];
    for (int r = 0; r < 12; r++) {
      for (int i = 0; i < 8; i++) {
        uint64_t &a = v[mixed[i][0]], &b = v[mixed[i][1]], &c = v[mixed[i][2]], &d = v[mixed[i][3]];
        a += b + m[sigma[r % 10][2 * i]];
        d = turn(d ^ a, 32);
        c += d;
        b = turn(b ^ c, 24);
        a += b + m[sigma[r % 10][2 * i + 1]];
        d = turn(d ^ a, 16);
        c += d;
        b = turn(b ^ c, 63);
      }
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
  } while (done < size);
  std::string out;
  for (int i = 0; i < 32; i++) {
    static const char digits[] = "0123456789abcdef";
    unsigned char byte = (unsigned char)(h[i / 8] >> (8 * (i % 8)));
    out += digits[byte >> 4];
    out += digits[byte & 15];
  }
  return out;
}

class Archive {
 public:
  struct Member {
    size_t start, size;
    std::string digest;
  };

  explicit Archive(const std::string& path) : path_(path) {
    int handle = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat found;
    if (handle < 0 || fstat(handle, &found)) throw std::runtime_error(path + ": no such file");
    size_ = (size_t)found.st_size;
    void* memory = mmap(nullptr, size_ ? size_ : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE, handle, 0);
    close(handle);
    if (memory == MAP_FAILED) refuse("it cannot be mapped");
    data_ = (unsigned char*)memory;
    index();
  }
  Archive(const Archive&) = delete;
  ~Archive() { munmap(data_, size_ ? size_ : 1); }

  const Member& member(const std::string& name) const {
    auto found = members_.find(name);
    if (found == members_.end()) refuse("there is no member " + name);
    return found->second;
  }
  // Where a member is in memory, unchecked; writes to it stay in this process.
  unsigned char* at(const Member& m) const { return data_ + m.start; }
  std::string read(const std::string& name) const {
    const Member& m = member(name);
    if (blake2b(at(m), m.size) != m.digest) refuse("its member " + name + " is damaged");
    return std::string((const char*)at(m), m.size);
  }
  [[noreturn]] void refuse(const std::string& why) const {
    throw std::runtime_error(path_ + " is not used: " + why + "; write it again with fuser.aot.compile");
  }

 private:
  std::string path_;
  unsigned char* data_ = nullptr;
  size_t size_ = 0;
  std::map<std::string, Member> members_;

  void index() {
    const void* newline = memchr(data_, '\n', size_ < 512 ? size_ : 512);
    if (!newline) refuse("it does not begin like an archive of fuser");
    size_t head = (size_t)((const unsigned char*)newline - data_) + 1;
    std::istringstream first(std::string((const char*)data_, head));
    std::string magic, digest, signature;
    size_t version = 0, length = 0;
    first >> magic >> version >> length >> digest >> signature;
    if (magic != "fuser-archive" || version != 1 || length > size_ - head) refuse("it is no archive of version 1");
    if (blake2b(data_ + head, length) != digest) refuse("its index is damaged");
    std::istringstream rows(std::string((const char*)data_ + head, length));
    auto round = [](size_t n) { return (n + 63) / 64 * 64; };
    size_t start = round(head + length), size;
    std::string name;
    while (rows >> size >> digest >> name) {
      if (size > size_ || start > size_ - size) refuse("it is cut");
      members_[name] = Member{start, size, digest};
      start += round(size);
    }
    if (start != size_) refuse("it is cut");
  }
};
