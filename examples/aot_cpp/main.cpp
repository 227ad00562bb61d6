// run FILE INPUTS RESULTS: run the program FILE for a list of tensors and numbers that torch.save wrote, and write its
// results for torch.load.

#define TORCH_VERSION_TEXT TORCH_STRING(TORCH_VERSION_NUMBERS)
#define TORCH_STRING(x) TORCH_STRING_(x)
#define TORCH_STRING_(x) #x

#include <torch/csrc/jit/serialization/pickle.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>

#include "program.h"

static double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int count, char** words) try {
  if (count != 4) {
    std::cerr << "expected: run FILE INPUTS RESULTS\n";
    return 2;
  }
  std::ifstream in(words[2], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  IValue given = torch::jit::pickle_load(bytes);
  std::vector<IValue> leaves;
  if (given.isTuple()) for (const IValue& v : given.toTupleRef().elements()) leaves.push_back(v);
  else for (const IValue& v : given.toListRef()) leaves.push_back(v);
  double start = seconds();
  Program program(words[1]);
  double loaded = seconds();
  std::vector<IValue> results = program(leaves);
  double first = seconds();
  program(leaves);
  std::cout << "load " << loaded - start << " s, first result " << first - loaded << " s, second " << seconds() - first
            << " s; groups: " << program.kernel_hits() << " by kernels, " << program.kernel_misses() << " by ATen\n";
  std::vector<char> out = torch::jit::pickle_save(c10::ivalue::Tuple::create(results));
  std::ofstream(words[3], std::ios::binary).write(out.data(), (std::streamsize)out.size());
  return 0;
} catch (const std::exception& e) {
  std::cerr << e.what() << "\n";
  return 1;
}
